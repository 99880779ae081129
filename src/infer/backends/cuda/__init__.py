"""GPU kernels in Triton, one per file, and the table of operations made of them. Nothing here is imported before it is chosen."""
