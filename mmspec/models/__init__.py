"""Model implementations that neither transformers nor diffusers has."""
