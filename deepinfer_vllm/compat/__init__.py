"""Every change this plugin makes to vLLM beyond its registries. Each wraps and none replaces; all are re-entrant.

| shim | vLLM | why | can go when |
|---|---|---|---|
| `hook_model_config` | 0.32, 0.33 | per-architecture config hooks are a private dict | vLLM registers them |
| `refuse_prompt_embeds` | 0.32, 0.33 | a model cannot say that it needs token ids | vLLM asks it |
| `blame_the_sender` | 0.32, 0.33 | an image that cannot be had is answered with 500 | vLLM answers with 4xx |
| `hook_seeded_sampling` | 0.32, 0.33, runner V1 | CPU generators have no offset to rewind by | vLLM needs none |
| `provide_torch_kernels` | 0.32 (refusal), 0.33 | V2 needs Triton, which CPUs have not | vLLM's V2 runs there |
| `provide_dspark` | 0.32, 0.33 | confidences and trimming are for CUDA graphs; their rule is fixed | they are not |
| `hook_grammar_requests` | 0.32, 0.33, runner V2 | a speculator gets no sampling parameters | it does |
| `add_cpu_collectives` | 0.32, 0.33, CPU | its communicator cannot gather or scatter unequal parts | vLLM's can |
| `hook_connector_config` | 0.32, 0.33 | connectors are made after the weights are loaded | vLLM asks them before |
| `hook_runner` | 0.32, 0.33, runner V1 | metadata lacks prompt logprobs and hit starts | runner V1 is gone |
| `spare_cpu_kernels` | 0.32, 0.33, CPU | batch invariance replaces torch's by Triton kernels | it asks for Triton |
| `refuse_what_workers_cannot_hold` | 0.32, 0.33 | long lists, numbers of too many bits end engines | it looks before |
| `drop_logprobs_of_padding` | 0.32, 0.33, runner V2 | prompt logprobs have rows of padding | it leaves them out |
| `list_lower_ids_first` | 0.32, 0.33 | which of equal logprobs are listed depends on the batch | vLLM breaks ties |
| `limit_rows_by_themselves` | 0.32, 0.33 | a top-p of one request shows in rows of others | it takes rows apart |
| `list_for_each_what_it_asked` | 0.32, 0.33, runner V1 | tokens one request names are all that is listed | V1 is gone |
| `flush_before_zeroing` | 0.32, 0.33, runner V2 | it zeroes blocks still to be copied | it asks the connector first |
| `carry_worker_reports` | 0.32, 0.33 | workers cannot report what only they know | vLLM lets them |
| `publish_reports` | 0.32, 0.33 | a plugin has no metrics of its own | vLLM lets it |
| `hook_eplb` | 0.32, 0.33 | EPLB's policies are a closed table, its state tells nothing | it takes policies |
| `let_drafts_stay` | 0.32, 0.33 | EPLB refuses layers it did not register, as V4.1's drafts | vLLM lets them be |
| `fill_eplb_presets` | 0.32, 0.33 | a configuration does not say what of it was given | it takes presets |
| `hold_answers` | 0.32, 0.33 | a connector cannot keep an answer until blocks are stored | vLLM lets it |
"""

from deepinfer_vllm.compat.connector_config import hook_connector_config
from deepinfer_vllm.compat.cpu_collectives import add_cpu_collectives
from deepinfer_vllm.compat.cpu_invariance import spare_cpu_kernels
from deepinfer_vllm.compat.dspark import provide_dspark
from deepinfer_vllm.compat.early_flush import flush_before_zeroing
from deepinfer_vllm.compat.engine_reports import publish_reports
from deepinfer_vllm.compat.eplb import hook_eplb
from deepinfer_vllm.compat.eplb_drafts import let_drafts_stay
from deepinfer_vllm.compat.eplb_presets import fill_eplb_presets
from deepinfer_vllm.compat.grammar_requests import hook_grammar_requests
from deepinfer_vllm.compat.held_answers import hold_answers
from deepinfer_vllm.compat.image_errors import blame_the_sender
from deepinfer_vllm.compat.long_lists import refuse_what_workers_cannot_hold
from deepinfer_vllm.compat.model_config import hook_model_config
from deepinfer_vllm.compat.named_logprobs import list_for_each_what_it_asked
from deepinfer_vllm.compat.own_limits import limit_rows_by_themselves
from deepinfer_vllm.compat.padded_prompts import drop_logprobs_of_padding
from deepinfer_vllm.compat.prompt_embeds import refuse_prompt_embeds
from deepinfer_vllm.compat.runner_facts import BATCH_FACTS, hook_runner
from deepinfer_vllm.compat.runner_v2 import provide_torch_kernels
from deepinfer_vllm.compat.seeded_sampling import hook_seeded_sampling
from deepinfer_vllm.compat.stable_logprobs import list_lower_ids_first
from deepinfer_vllm.compat.worker_reports import carry_worker_reports

__all__ = [
    "BATCH_FACTS",
    "add_cpu_collectives",
    "blame_the_sender",
    "carry_worker_reports",
    "drop_logprobs_of_padding",
    "fill_eplb_presets",
    "flush_before_zeroing",
    "hold_answers",
    "hook_connector_config",
    "hook_eplb",
    "hook_grammar_requests",
    "hook_model_config",
    "hook_runner",
    "hook_seeded_sampling",
    "let_drafts_stay",
    "limit_rows_by_themselves",
    "list_for_each_what_it_asked",
    "list_lower_ids_first",
    "provide_dspark",
    "provide_torch_kernels",
    "publish_reports",
    "refuse_prompt_embeds",
    "refuse_what_workers_cannot_hold",
    "spare_cpu_kernels",
]
