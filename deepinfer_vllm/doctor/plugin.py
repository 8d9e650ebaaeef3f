"""Is this plugin installed, registered once, let through by VLLM_PLUGINS, and which class does V4.1 resolve to?"""

import os

from deepinfer_vllm import envs
from deepinfer_vllm.doctor.check import Check, Status
from deepinfer_vllm.doctor.environment import Environment
from deepinfer_vllm.doctor.probe import Outcome

NAME = "deepinfer_vllm"
GROUP = "vllm.general_plugins"
TARGET = "deepinfer_vllm:register"


def check_entry_point(environment: Environment) -> Check:
    """Exactly one entry point must lead to `register`."""
    name = "plugin entry point"
    found = [point.name for point in environment.entry_points(GROUP) if point.value == TARGET]
    if found == [NAME]:
        return Check(name, Status.OK, f"{GROUP}: {NAME} = {TARGET}")
    if not found:
        return Check(name, Status.FAIL, f"no entry point {NAME} in {GROUP}", "pip install deepinfer-vllm here")
    return Check(
        name,
        Status.FAIL,
        f"{len(found)} entry points in {GROUP} lead to {TARGET}: {', '.join(found)}",
        "uninstall what else declares it: register must be reached once, as deepinfer_vllm",
    )


def check_filter() -> Check:
    """VLLM_PLUGINS, when set, is the list of the only plugins that vLLM loads."""
    name = "VLLM_PLUGINS"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None:
        return Check(name, Status.OK, "not set: every plugin is loaded")
    if NAME in allowed.split(","):
        return Check(name, Status.OK, allowed)
    return Check(name, Status.FAIL, f"{allowed!r} leaves {NAME} out", f"add {NAME} to it, or unset VLLM_PLUGINS")


def check_variables() -> Check:
    """Every DEEPINFER_VLLM_* variable must have a value that is allowed."""
    name = "our variables"
    try:
        envs.check()
    except ValueError as error:
        return Check(name, Status.FAIL, str(error), "docs/configuration.md lists the variables")
    given = [f"{variable}={os.environ[variable]}" for variable in envs.TABLE if os.environ.get(variable)]
    return Check(name, Status.OK, " ".join(given) or "none is set: defaults")


def check_registered(plugins: Outcome) -> Check:
    """`plugins`: the names vLLM loaded, after every register() ran."""
    name = "plugin registered"
    if not plugins.ok:
        return Check(name, Status.FAIL, plugins.text, "see the rows above; a plugin that raises stops vLLM")
    if NAME in plugins.text.split():
        return Check(name, Status.OK, f"vLLM loaded {plugins.text.replace(' ', ', ')}")
    return Check(name, Status.FAIL, f"vLLM loaded {plugins.text or 'no plugin'}", "see the rows above")


def check_model_class(model: Outcome, platform: Outcome) -> Check:
    """`model`: module:class that DeepseekV41ForCausalLM is registered as; `platform`: its kind, then its class."""
    name = "DeepSeek-V4.1 model"
    if not model.ok:
        return Check(name, Status.FAIL, model.text, "see the rows above")
    try:
        wanted = envs.DEEPINFER_VLLM_MODEL
    except ValueError:
        return Check(name, Status.FAIL, "not known without DEEPINFER_VLLM_MODEL", "see the rows above")
    ours = model.text.startswith("deepinfer_vllm.")
    found = f"{'portable' if ours else 'upstream'}: {model.text}"
    kind = platform.text.split()[0] if platform.ok else "unknown"
    runs_upstream = kind in ("cuda", "rocm")
    if wanted == "upstream" and not runs_upstream:
        remedy = "unset DEEPINFER_VLLM_MODEL"
        return Check(name, Status.FAIL, f"{found}; vLLM's own class does not run on platform {kind}", remedy)
    if not ours and (wanted == "portable" or not runs_upstream):
        return Check(
            name, Status.FAIL, f"{found}; platform {kind} needs ours", "the plugin did not register: see above"
        )
    return Check(name, Status.OK, found)
