"""Reading and writing drafters: one key map per published layout, strict both ways, safetensors out."""
