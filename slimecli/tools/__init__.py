"""Tools that a model may call, how it calls them, and what runs them."""
