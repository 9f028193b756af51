"""OpenAI's chat completions over a tier: what a client may ask, what it is told, and the HTTP in between."""
