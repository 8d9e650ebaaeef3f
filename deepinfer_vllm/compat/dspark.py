"""DSpark on the host: our speculator in place of vLLM's, and runner V2, which it needs, without being asked for it.

On CUDA, our rule in vLLM's own manager.
"""

import functools
from typing import Any

from deepinfer_vllm.compat.late import after_import


def provide_dspark() -> None:
    """Let method "dspark" just work on a CPU; on CUDA, decide about drafts where vLLM does."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        after_import("vllm.v1.worker.gpu.spec_decode.adaptive_verification", decide_by_our_rule)
    if current_platform.is_cpu():
        _choose_v2()
        _need_no_graphs()
        _build_ours(type(current_platform))


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
    """Take `enable_adaptive_verification` for what our verifier does anyway; vLLM refuses it without CUDA graphs."""
    from vllm.config import VllmConfig

    from deepinfer_vllm import envs

    validate = VllmConfig._validate_adaptive_verification
    if hasattr(validate, "deepinfer_dspark"):
        return

    @functools.wraps(validate)
    def validate_or_take_over(self: Any) -> None:
        speculative = self.speculative_config
        asked = speculative is not None and speculative.enable_adaptive_verification
        if asked and speculative.method == "dspark":
            if envs.DEEPINFER_VLLM_DSPARK_BUDGET == "fixed":
                raise ValueError(
                    "enable_adaptive_verification=true in --speculative-config asks for what "
                    "DEEPINFER_VLLM_DSPARK_BUDGET=fixed switches off. Leave one of them out"
                )
            speculative.enable_adaptive_verification = False
        validate(self)

    validate_or_take_over.deepinfer_dspark = True  # type: ignore[attr-defined]
    VllmConfig._validate_adaptive_verification = validate_or_take_over


def _build_ours(platform: Any) -> None:
    """As a worker starts, and before it imports its runner, put our speculator where runners look for one."""
    register = platform.register_triton_kernel_overrides.__func__
    if hasattr(register, "deepinfer_dspark"):
        return

    @functools.wraps(register)
    def register_and_hook(cls: Any) -> None:
        register(cls)
        hook_speculator()

    register_and_hook.deepinfer_dspark = True  # type: ignore[attr-defined]
    platform.register_triton_kernel_overrides = classmethod(register_and_hook)


def hook_speculator() -> None:
    """Build our speculator for method "dspark"; the runner takes the function from its package by name."""
    import sys

    from vllm.v1.worker.gpu import spec_decode

    build = spec_decode.init_speculator
    if hasattr(build, "deepinfer_dspark"):
        return

    @functools.wraps(build)
    def build_ours(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if vllm_config.speculative_config.method != "dspark":
            return build(vllm_config, device, req_states)
        from deepinfer_vllm.spec_decode.grammar_drafts import grammar_drafts
        from deepinfer_vllm.spec_decode.speculator import HostSpeculator

        hook_host_runner()
        speculator = HostSpeculator(vllm_config, device)
        speculator.grammar = grammar_drafts(vllm_config)
        return speculator

    build_ours.deepinfer_dspark = True  # type: ignore[attr-defined]
    spec_decode.init_speculator = build_ours
    runner: Any = sys.modules.get("vllm.v1.worker.gpu.model_runner")
    if runner is not None:
        runner.init_speculator = build_ours


def hook_host_runner() -> None:
    """Let runner V2 ask our verifier where its device is the host. Called as our speculator is built.

    The runner has a place for the manager of adaptive verification, and fills it where CUDA graphs replay what it
    trims. Ours, which needs none, is put there once the caches are there, and is called as vLLM's own would be.
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    if hasattr(GPUModelRunner, "deepinfer_verifier"):
        return
    GPUModelRunner.deepinfer_verifier = None
    fill, execute, take = (
        GPUModelRunner.initialize_kv_cache,
        GPUModelRunner.execute_model,
        GPUModelRunner.take_draft_token_ids,
    )
    extra = (None,) if hasattr(adaptive_verification, "AdmittedDraftCounts") else ()  # vLLM 0.33 also says which

    @functools.wraps(fill)
    def fill_and_start(self: Any, *args: Any, **kwargs: Any) -> None:
        from deepinfer_vllm.spec_decode.speculator import HostSpeculator
        from deepinfer_vllm.spec_decode.start import start

        fill(self, *args, **kwargs)
        if isinstance(self.speculator, HostSpeculator):
            self.deepinfer_verifier = start(self, extra)

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

    GPUModelRunner.initialize_kv_cache = fill_and_start
    GPUModelRunner.execute_model = begin_and_execute
    GPUModelRunner.take_draft_token_ids = take_what_was_drafted


def decide_by_our_rule(module: Any) -> None:
    """Make vLLM's manager of adaptive verification one of ours, if that is on and the method "dspark"."""
    make = module.maybe_create_adaptive_verification_manager
    if hasattr(make, "deepinfer_dspark"):
        return

    @functools.wraps(make)
    def make_ours(*, vllm_config: Any, **kwargs: Any) -> Any:
        from deepinfer_vllm.spec_decode.settings import Settings

        speculative, settings = vllm_config.speculative_config, Settings.read(current=False)
        if speculative is None or speculative.method != "dspark" or settings.form == "fixed":
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
