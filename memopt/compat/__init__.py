"""The private names of torch that memopt uses, one module for each subject; the rest of memopt uses public names only.

Each module declares its private names in `PRIVATE_NAMES`, with the torch versions that have them where not all of 2.11
to 2.15 do. `check` finds out whether this torch has them; `tests/compat/private_names.py` finds private names
elsewhere. Import from the subject's module: this package exports nothing, and its modules import Dynamo, AOTAutograd,
inductor and sympy inside the functions that need them."""
