"""The operators that memopt defines, and their kernels."""
