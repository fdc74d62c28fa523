"""The training step: microbatches, loss scaling, clipping, optimisers and schedulers, in the order that is right."""

from memopt.train.step_result import StepResult
from memopt.train.train_step import TrainStep

__all__ = ["StepResult", "TrainStep"]
