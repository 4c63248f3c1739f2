"""The GPT in ordinary single-device code; the attention function is handed in."""
