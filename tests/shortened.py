"""Library models with two of their blocks, for tests of what does not depend on how many there are."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from examples.models.families import FAMILIES, Family, checkpoint_library_blocks

BLOCKS = 2


def _shortened(family: Family) -> Family:
    """The family whose models have the first blocks of each of their lists of equal ones."""

    def make() -> nn.Module:
        model = family.make()
        for module in list(model.modules()):
            for name, blocks in list(module.named_children()):
                if isinstance(blocks, nn.ModuleList) and len(blocks) > BLOCKS and len(set(map(type, blocks))) == 1:
                    setattr(module, name, blocks[:BLOCKS])
        return model

    return replace(family, make=make)


SHORT = {
    family.name: _shortened(family) if family.per_block_checkpoint is checkpoint_library_blocks else family
    for family in FAMILIES
}
"""The families by their names; the models of our own, whose blocks differ in their sizes, as they are."""
