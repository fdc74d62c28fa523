"""A step as files for tools that people have: PyTorch's memory visualiser, trace viewers, Graphviz and Netron."""

from memopt.show.exports.write import FORMATS, write_export

__all__ = ["FORMATS", "write_export"]
