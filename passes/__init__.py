"""Rewrites of ATen graphs: each pass takes a graph module, returns another one, and checks its result."""

from passes.apply_schedule import ApplySchedule, HostStay
from passes.canonicalize import (
    CANONICAL,
    EliminateDeadCode,
    MergeCommonSubexpressions,
    NextToProducer,
    RemoveDetach,
)
from passes.chunk_loss import ChunkLoss, FoundLoss, find_losses
from passes.forward_writes import ForwardWrites
from passes.fp8_linears import FoundLinear, Fp8Linears, find_fp8_linears
from passes.fuse_activations import FuseActivations, find_activations
from passes.fuse_attention import FuseAttention, find_attentions
from passes.fuse_norms import FuseNorms, find_norms
from passes.graph_pass import GraphKind, Pass, PassError, Pipeline, copy_graph_module, passes_for
from passes.graphs.decisions import find_decisions, mark_deciding
from passes.graphs.edit import erase_unread, new_call, replace_node
from passes.graphs.graph_text import GraphDiff, diff_graphs, format_graph, format_node
from passes.graphs.node_facts import is_pure, is_random
from passes.graphs.verify import VerifyError
from passes.insert_casts import InsertCasts
from passes.merge_casts import MergeCasts, SumInFp32
from passes.narrow_saved import NarrowSaved
from passes.patterns.row_segments import RowSegment, find_row_segments
from passes.reinplace import FreeFirst, Reinplace, find_reuses
from passes.rewrite_pattern import Found, RewritePattern
from passes.tile_rows import TileRows

__all__ = [
    "CANONICAL", "ApplySchedule", "ChunkLoss", "EliminateDeadCode", "ForwardWrites", "Found",
    "FoundLinear", "FoundLoss", "Fp8Linears", "FreeFirst", "FuseActivations", "FuseAttention",
    "FuseNorms", "GraphDiff", "GraphKind", "HostStay", "InsertCasts", "MergeCasts",
    "MergeCommonSubexpressions", "NarrowSaved", "NextToProducer", "Pass", "PassError", "Pipeline", "Reinplace",
    "RemoveDetach", "RewritePattern", "RowSegment", "SumInFp32", "TileRows", "VerifyError",
    "copy_graph_module", "diff_graphs", "erase_unread", "find_activations", "find_attentions", "find_decisions",
    "find_fp8_linears", "find_losses", "find_norms", "find_reuses", "find_row_segments", "format_graph", "format_node",
    "is_pure", "is_random", "mark_deciding", "new_call", "passes_for", "replace_node",
]  # fmt: skip
