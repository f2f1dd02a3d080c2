"""The embedded rollout engine: slots, continuous batching, own KV cache, SGLang's replies."""
