"""SGLang as the engine: its arguments, its servers, and the proof of what a server holds. It is never imported here."""
