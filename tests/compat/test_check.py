"""The private names of torch that memopt uses, in this torch and in one that lacks or changes some."""

import re
import subprocess
import sys
import time
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch._dynamo.variables
import torch._functorch.aot_autograd
import torch._inductor.compile_fx
import torch.distributed.fsdp
import torch.distributed.pipelining

from memopt.compat import check as checking
from memopt.compat.check import NEWEST, OLDEST, check, missing_names
from memopt.errors import TorchNamesError
from passes.compat import Private, private
from tests.compat.private_names import private_names

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _anew(monkeypatch):
    monkeypatch.setattr(checking, "_checked", set())
    monkeypatch.setattr(checking, "_told", [])
    monkeypatch.setattr(checking, "_known", [0])


def declared(monkeypatch, *names: Private) -> None:
    """Have a module of memopt declare these names in place of its own."""
    monkeypatch.setattr(checking, "_known", [0])
    monkeypatch.setattr(sys.modules["memopt.compat.tracing"], "PRIVATE_NAMES", names)


def test_this_torch_has_all_names_of_all_modules_and_the_check_takes_milliseconds():
    with pytest.raises(TorchNamesError, match="nothing"):
        raise missing_names(ImportError("nothing"))  # imports all modules of memopt.compat
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start = time.perf_counter()
        check()
        first = time.perf_counter() - start
        start = time.perf_counter()
        check()
    assert len(checking._checked) > 150
    assert first < 0.5  # 4 ms on a machine that does nothing else
    assert time.perf_counter() - start < 0.01


def test_a_name_that_is_needed_and_missing_is_an_error_that_names_all_of_them_and_the_mend(monkeypatch):
    monkeypatch.delattr(torch.fx.graph, "_BoxedCodeGen")
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    with pytest.raises(TorchNamesError) as raised:
        check()
    message = str(raised.value)
    assert "torch.fx.graph._BoxedCodeGen is missing (memopt.compat.tracing)" in message
    assert "torch._C._current_graph_task_id is missing (memopt.compat.autograd)" in message
    assert "pip install 'torch>=2.11,<2.16'" in message
    with pytest.raises(TorchNamesError):  # again, at the next call
        check()


def test_a_method_that_is_replaced_and_has_changed_is_one_warning(monkeypatch):
    def method_requires_grad_(self, tx):
        raise NotImplementedError

    monkeypatch.setattr(torch._dynamo.variables.TensorVariable, "method_requires_grad_", method_requires_grad_)
    monkeypatch.delattr(torch._dynamo.variables.TensorVariable, "method_addcmul_")
    with pytest.warns(UserWarning, match="differs") as told:
        check()
    check()
    assert len(told) == 1
    assert "TensorVariable.method_requires_grad_ takes (self, tx) and not (self, tx, requires_grad)" in str(
        told[0].message
    )
    assert "TensorVariable.method_addcmul_ is missing (memopt.compat.dynamo_rules)" in str(told[0].message)


def test_a_newer_torch_is_warned_of_once(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    with pytest.warns(UserWarning, match="is newer than those that memopt was tested with") as told:
        check()
    check()
    assert len(told) == 1


def test_a_name_is_looked_for_in_the_versions_that_have_it(monkeypatch):
    later = private("torch: _no_such_name [since 2.98]")
    earlier = private("torch: _no_such_name [until 2.10]")
    declared(monkeypatch, *later, *earlier)
    check()
    declared(monkeypatch, *private("torch: _no_such_name [since 2.11, until 2.98]"))
    with pytest.raises(TorchNamesError, match="_no_such_name"):
        check()


def test_what_is_not_imported_yet_is_checked_later(monkeypatch):
    declared(monkeypatch, *private("torch._not_imported_yet: _no_such_name"))
    check()
    monkeypatch.setitem(sys.modules, "torch._not_imported_yet", torch)
    with pytest.raises(TorchNamesError, match="_not_imported_yet"):
        check()


def test_attributes_of_instances_are_found_in_the_class(monkeypatch):
    declared(monkeypatch, *private("torch.nn: Module._buffers? ._no_such_attribute?"))
    with pytest.warns(UserWarning, match="_no_such_attribute") as told:
        check()
    assert "_buffers" not in str(told[0].message)


SET_BY_OTHERS = {
    "_boxed_call": "memopt sets it on its functions, AOTAutograd reads it",
    "_dynamo_source": "Dynamo sets it on nodes",
    "_initializing": "Python's own imports set it",
    "_get_dynamo_config_for_logging": "may be missing: nothing is logged then",
    "_step_supports_amp_scaling": "some optimizers set it",
    "_wrapped_by_lr_sched": "schedulers set it on the step of an optimizer",
    "_tp_plan": "models of transformers have it",
    "_start_trace": "of the legacy profiler, which may be missing",
    "_enable_profiler_legacy": "of the legacy profiler, which may be missing",
    "_disable_profiler_legacy": "of the legacy profiler, which may be missing",
}
"""Private names that are no part of torch, or that memopt does without, each with the reason."""


def test_every_private_name_in_the_code_is_declared():
    files = [*(ROOT / "memopt/compat").glob("*.py"), ROOT / "passes/compat.py"]
    modules = [import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in files]
    known = {
        word for module in modules for name in getattr(module, "PRIVATE_NAMES", ()) for word in name.path.split(".")
    }
    used = {re.findall(r"\w+", name.name)[-1]: str(name) for path in files for name in private_names(path)}
    unknown = [place for word, place in used.items() if word.startswith("_") and word not in known | set(SET_BY_OTHERS)]
    assert not unknown


def test_a_program_that_imports_nothing_else_has_all_names():
    """A part of torch that is declared by the package that it belongs to is looked for before it is imported."""
    program = (
        "import warnings, torch, memopt; warnings.simplefilter('error')\n"
        "model = torch.nn.Linear(2, 2)\n"
        "memopt.optimize(model, 0.1, optimizer=torch.optim.SGD)\n"
        "model(torch.rand(3, 2)).sum().backward()"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert not ran.returncode, ran.stderr


def test_the_versions_are_those_of_pyproject():
    bound = f'"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"'
    assert bound in (ROOT / "pyproject.toml").read_text()


def test_a_name_that_a_module_imports_is_named_when_memopt_is_first_used():
    program = (
        "import torch.fx.graph, torch.optim.optimizer as optimizer, memopt\n"
        "del torch.fx.graph._BoxedCodeGen, optimizer._foreach_supported_types\n"
        "try:\n    memopt.optimize\nexcept ImportError as error:\n    print(type(error).__name__, error)\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "TorchNamesError" in printed
    assert "'_BoxedCodeGen'" in printed
    assert "'_foreach_supported_types'" in printed
    assert "pip install 'torch>=2.11,<2.16'" in printed
