"""From problems to ids: sources, tokenizer, chat protocol, demonstrations and packing."""
