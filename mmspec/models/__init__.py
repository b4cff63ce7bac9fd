"""Networks that neither transformers nor diffusers has."""
