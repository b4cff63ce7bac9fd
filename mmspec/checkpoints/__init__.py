"""Reading and writing drafter checkpoints: one key map per published layout, strict checks, safetensors out."""
