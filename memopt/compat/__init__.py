"""The private names of torch that memopt uses, one module for each subject; the rest of memopt uses public names only.

Each module lists its private names with the torch versions that were looked at: 2.13 by the tests, the others in their
source. `tests/compat/private_names.py` finds private names elsewhere. Import from the subject's module: this package
exports nothing, and its modules import Dynamo, AOTAutograd, inductor and sympy inside the functions that need them.
"""
