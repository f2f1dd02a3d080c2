"""OpenAI's and Anthropic's protocols over any engine, token in and token out, and what is trained on afterwards."""
