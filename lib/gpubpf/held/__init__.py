"""gpumem: which host stacks hold GPU memory, what is never freed, and which calls fail."""
