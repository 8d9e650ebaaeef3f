"""EPLB's presets: what the user left unset of `eplb_config`, filled once the engine's configuration is whole.

A parsed configuration does not say which of its fields were given. vLLM makes it in two ways, by calling the class and
from the command line's JSON (dotted flags become such JSON); both end in the class's validator, so that is where the
names are noted. A configuration made before plugins were loaded, as of `LLM(eplb_config={...})` in a fresh process,
has no note: there a field counts as given if it differs from vLLM's default.
"""

import functools
import json
import logging
import weakref
from typing import Any

from deepinfer_vllm.compat.eplb import check_eplb
from deepinfer_vllm.compat.late import after_import

HOOKED = "deepinfer_eplb_presets"

_given: dict[int, tuple[Any, frozenset[str]]] = {}
"""By the id of a configuration, while it is there: a weak reference, and the names of the fields that were given. An
attribute would be in the way: vLLM hashes and copies a configuration by all it finds in it."""

logger = logging.getLogger("vllm.deepinfer")


def fill_eplb_presets() -> None:
    """Let DEEPINFER_VLLM_EPLB decide what `--eplb-config` leaves open."""
    after_import("vllm.config.parallel", _note_given)
    after_import("vllm.engine.arg_utils", _fill)


class _NotingValidator:
    """A pydantic validator that notes on what it makes which fields were given."""

    def __init__(self, validator: Any) -> None:
        self._validator = validator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._validator, name)

    def validate_python(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        made = self._validator.validate_python(data, *args, **kwargs)
        given = getattr(data, "kwargs", None) or (data if isinstance(data, dict) else {})
        return _noted(made, kwargs.get("self_instance", made), given)

    def validate_json(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        made = self._validator.validate_json(data, *args, **kwargs)
        return _noted(made, made, json.loads(data))


def _noted(made: Any, config: Any, given: Any) -> Any:
    if id(config) not in _given:  # what is a configuration already passes through unchanged
        _note(config, frozenset(given))
    return made


def _note(config: Any, given: frozenset[str]) -> None:
    key = id(config)
    _given[key] = weakref.ref(config, lambda _: _given.pop(key, None)), given


def _note_given(module: Any) -> None:
    validator = module.EPLBConfig.__pydantic_validator__
    if not isinstance(validator, _NotingValidator):
        module.EPLBConfig.__pydantic_validator__ = _NotingValidator(validator)


def _fill(module: Any) -> None:
    create = module.EngineArgs.create_engine_config
    if hasattr(create, HOOKED):
        return

    @functools.wraps(create)
    def create_and_fill(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        fill(config)
        if config.parallel_config.enable_eplb:
            check_eplb()
        return config

    setattr(create_and_fill, HOOKED, True)
    module.EngineArgs.create_engine_config = create_and_fill


def fill(vllm_config: Any) -> None:
    """Fill what is unset of EPLB, and say so. Raises ValueError for a variable with a value that is not allowed."""
    from deepinfer_vllm import envs
    from deepinfer_vllm.eplb.presets import PRESETS

    name = envs.DEEPINFER_VLLM_EPLB
    parallel, eplb = vllm_config.parallel_config, vllm_config.parallel_config.eplb_config
    if name == "off":
        return
    experts = vllm_config.model_config.get_num_experts()
    if not parallel.enable_eplb or not experts:
        why = "the model has no experts" if parallel.enable_eplb else "--enable-eplb is not given"
        logger.warning("DEEPINFER_VLLM_EPLB=%s has no effect: %s.", name, why)
        return
    ranks = parallel.world_size_across_dp // parallel.pipeline_parallel_size
    unset = {
        field: value for field, value in PRESETS[name].settings(experts, ranks).items() if not _is_given(eplb, field)
    }
    for field, value in unset.items():
        setattr(eplb, field, value)
    _note(eplb, frozenset(PRESETS[name].settings(experts, ranks)))
    filled = ", ".join(f"{field}={value}" for field, value in unset.items()) or "nothing, all was given"
    logger.info("DEEPINFER_VLLM_EPLB=%s sets of EPLB: %s.", name, filled)


def _is_given(eplb: Any, field: str) -> bool:
    if id(eplb) in _given:
        return field in _given[id(eplb)][1]
    return bool(getattr(eplb, field) != getattr(type(eplb)(), field))
