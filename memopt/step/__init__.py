"""The training step: microbatches, loss scaling, clipping, optimisers and schedulers, in the order that is right."""

from memopt.step.step_result import StepResult
from memopt.step.train_step import TrainStep

__all__ = ["StepResult", "TrainStep"]
