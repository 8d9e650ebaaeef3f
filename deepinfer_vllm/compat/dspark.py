"""DSpark with our speculator in place of vLLM's, decided by our rule, and with what vLLM asks for it left out.

That is runner V2, which it needs, without being asked for it, and no CUDA graphs; where vLLM has some, they are for any
number of drafts (`dspark_graphs`). Where vLLM's own adaptive verification is asked for and has its graphs, our rule
decides in vLLM's manager.
"""

import functools
from typing import Any

from deepinfer_vllm.compat.dspark_graphs import PLANNING, any_drafts
from deepinfer_vllm.compat.late import after_import


def provide_dspark() -> None:
    """Let method "dspark" just work, on any device whose runner is vLLM's V2."""
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        _choose_v2()
    _need_no_graphs()
    after_import("vllm.v1.worker.gpu.spec_decode.adaptive_verification", decide_by_our_rule)
    after_import("vllm.v1.worker.gpu.spec_decode", hook_speculator)
    after_import("vllm.v1.worker.gpu.model_runner", hook_runner)
    after_import("vllm.v1.worker.worker_base", start_after_warm_up)


def _choose_v2() -> None:
    """Where nobody chose a runner, V2 runs DSpark: it has no other, and vLLM would only take it where Triton is."""
    from vllm import envs
    from vllm.config import VllmConfig

    chosen = VllmConfig.use_v2_model_runner.fget
    if hasattr(chosen, "deepinfer_dspark"):
        return

    @functools.wraps(chosen)
    def chosen_for_dspark(self: Any) -> bool:
        speculative = self.speculative_config
        if envs.VLLM_USE_V2_MODEL_RUNNER is None and speculative is not None and speculative.method == "dspark":
            return True
        return bool(chosen(self))

    chosen_for_dspark.deepinfer_dspark = True  # type: ignore[attr-defined]
    VllmConfig.use_v2_model_runner = property(chosen_for_dspark)


def _need_no_graphs() -> None:
    """Where vLLM would refuse `enable_adaptive_verification` for want of CUDA graphs, take it for what ours does."""
    from vllm.config import VllmConfig

    from deepinfer_vllm import envs

    validate = VllmConfig._validate_adaptive_verification
    if hasattr(validate, "deepinfer_dspark"):
        return

    @functools.wraps(validate)
    def validate_or_take_over(self: Any) -> None:
        speculative = self.speculative_config
        asked = speculative is not None and speculative.enable_adaptive_verification
        graphs = self.compilation_config.cudagraph_mode.has_full_cudagraphs()
        if asked and speculative.method == "dspark" and not graphs:
            if envs.DEEPINFER_VLLM_DSPARK_BUDGET == "fixed":
                raise ValueError(
                    "enable_adaptive_verification=true in --speculative-config asks for what "
                    "DEEPINFER_VLLM_DSPARK_BUDGET=fixed switches off. Leave one of them out"
                )
            speculative.enable_adaptive_verification = False
        validate(self)

    validate_or_take_over.deepinfer_dspark = True  # type: ignore[attr-defined]
    VllmConfig._validate_adaptive_verification = validate_or_take_over


def hook_speculator(module: Any) -> None:
    """Build our speculator for method "dspark", unless it is for vLLM's own adaptive verification."""
    build = module.init_speculator
    if hasattr(build, "deepinfer_dspark"):
        return

    @functools.wraps(build)
    def build_ours(vllm_config: Any, device: Any, req_states: Any) -> Any:
        speculative = vllm_config.speculative_config
        if speculative.method != "dspark" or speculative.enable_adaptive_verification:
            return build(vllm_config, device, req_states)
        from deepinfer_vllm.spec_decode.grammar_drafts import grammar_drafts
        from deepinfer_vllm.spec_decode.speculator import ControlledSpeculator

        speculator = ControlledSpeculator(vllm_config, device)
        if device.type == "cpu":  # elsewhere drafts are drawn in graphs, and before the host knows of them
            speculator.grammar = grammar_drafts(vllm_config)
        return speculator

    build_ours.deepinfer_dspark = True  # type: ignore[attr-defined]
    module.init_speculator = build_ours


def hook_runner(module: Any) -> None:
    """Let runner V2 ask our verifier.

    It has a place for the manager of adaptive verification, and fills it where CUDA graphs replay what it trims. Ours,
    which needs none, is put there once steps can be timed, and is called as vLLM's own would be.
    """
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    runner = module.GPUModelRunner
    if hasattr(runner, "deepinfer_verifier"):
        return
    runner.deepinfer_verifier = None
    fill, execute, take = runner.initialize_kv_cache, runner.execute_model, runner.take_draft_token_ids
    extra = (None,) if hasattr(adaptive_verification, "AdmittedDraftCounts") else ()  # vLLM 0.33 also says which

    def begin_to_decide(self: Any) -> None:
        if self.speculator is None:
            return
        from deepinfer_vllm.spec_decode.speculator import ControlledSpeculator
        from deepinfer_vllm.spec_decode.start import start

        if isinstance(self.speculator, ControlledSpeculator) and self.speculator.decider is None:
            self.deepinfer_verifier = start(self, extra)

    @functools.wraps(fill)
    def fill_and_start(self: Any, *args: Any, **kwargs: Any) -> None:
        fill(self, *args, **kwargs)
        if self.adaptive_verification is PLANNING:
            self.adaptive_verification = None
        if self.device.type == "cpu":
            begin_to_decide(self)

    @functools.wraps(execute)
    def begin_and_execute(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        verifier = self.deepinfer_verifier
        if verifier is not None and not kwargs.get("dummy_run") and scheduler_output.total_num_scheduled_tokens:
            encodes = bool(scheduler_output.scheduled_encoder_inputs)
            verifier.began(usual=not encodes, idle=self.adaptive_verification is None)
        return execute(self, scheduler_output, *args, **kwargs)

    @functools.wraps(take)
    def take_what_was_drafted(self: Any) -> Any:
        drafts = take(self)  # the runner answers without looking, and the scheduler would make room for them
        if drafts is not None and not getattr(self.speculator, "drafting", True):
            drafts.draft_token_ids = [[] for _ in drafts.req_ids]
        return drafts

    runner.deepinfer_begin_to_decide = begin_to_decide
    runner.initialize_kv_cache = fill_and_start
    runner.execute_model = begin_and_execute
    runner.take_draft_token_ids = take_what_was_drafted


def start_after_warm_up(module: Any) -> None:
    """On a device that is not the host, begin once kernels are compiled and graphs captured, by whatever worker.

    Platforms out of vLLM's tree bring their own, which need not call vLLM's.
    """
    make = module.WorkerWrapperBase.init_worker
    if hasattr(make, "deepinfer_dspark"):
        return

    @functools.wraps(make)
    def make_and_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = make(self, *args, **kwargs)
        _begin_after_warm_up(type(self.worker))
        return made

    make_and_hook.deepinfer_dspark = True  # type: ignore[attr-defined]
    module.WorkerWrapperBase.init_worker = make_and_hook


def _begin_after_warm_up(worker: Any) -> None:
    warm_up = worker.compile_or_warm_up_model
    if hasattr(warm_up, "deepinfer_dspark"):
        return

    @functools.wraps(warm_up)
    def warm_up_and_start(self: Any) -> Any:
        seconds = warm_up(self)
        begin = getattr(self.model_runner, "deepinfer_begin_to_decide", None)
        if begin is not None and self.model_runner.device.type != "cpu":
            begin()
        return seconds

    warm_up_and_start.deepinfer_dspark = True  # type: ignore[attr-defined]
    worker.compile_or_warm_up_model = warm_up_and_start


def decide_by_our_rule(module: Any) -> None:
    """For method "dspark", make vLLM's manager of adaptive verification one of ours where that is on, and have graphs
    for any number of drafts where it is not."""
    make = module.maybe_create_adaptive_verification_manager
    if hasattr(make, "deepinfer_dspark"):
        return

    @functools.wraps(make)
    def make_ours(*, vllm_config: Any, **kwargs: Any) -> Any:
        speculative = vllm_config.speculative_config
        if speculative is None or speculative.method != "dspark":
            return make(vllm_config=vllm_config, **kwargs)
        if not speculative.enable_adaptive_verification:
            return any_drafts(module, vllm_config, kwargs)
        from deepinfer_vllm.spec_decode.settings import Settings

        settings = Settings.read(current=False)
        if settings.form == "fixed":
            return make(vllm_config=vllm_config, **kwargs)
        from deepinfer_vllm.spec_decode.chosen_calibration import load_calibration
        from deepinfer_vllm.spec_decode.device_verifier import DeviceVerifier

        vllms, module.AdaptiveVerificationManager = module.AdaptiveVerificationManager, DeviceVerifier
        try:
            manager = make(vllm_config=vllm_config, **kwargs)
        finally:
            module.AdaptiveVerificationManager = vllms
        if manager is not None:
            manager.configure(settings, load_calibration(settings.calibration, vllm_config))
        return manager

    make_ours.deepinfer_dspark = True  # type: ignore[attr-defined]
    module.maybe_create_adaptive_verification_manager = make_ours
