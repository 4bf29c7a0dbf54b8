"""From what a user asks for to text: open an engine, encode prompts, decode, show the text and what happened."""
