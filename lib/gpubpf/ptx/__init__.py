"""PTX: tokens and model (`tokens`, `module`), basic blocks (`flow`), injection (`inject`)."""
