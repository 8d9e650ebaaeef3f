"""Drafting and its verification: blocks to draft, drafts that stand, the token after them."""

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer_vllm.torch_kernels.logit_sums import cumulative_log_p, local_logits_stats, local_residual_mass
from kernels.launch import Case, Launch, Random, bounds

REQUESTS, VOCABULARY, BLOCK, STEPS = 7, 300, 64, 4
BLOCKS = -(-VOCABULARY // BLOCK)
SAMPLER, UTILS = "spec_decode.rejection_sampler", "spec_decode.rejection_sampler_utils"


def strided(tensor: torch.Tensor | None, name: str) -> dict[str, Any]:
    """A matrix, or none, and its row stride, as launches pass them."""
    return {f"{name}_ptr": tensor, f"{name}_stride": 0 if tensor is None else tensor.stride(0)}


@dataclass
class Batch:
    """Requests with up to STEPS drafts each, the logits that judge them, and the sums of these."""

    requests: torch.Tensor
    cu_num_logits: torch.Tensor
    expanded: torch.Tensor
    local: torch.Tensor
    drafts: torch.Tensor
    """[N]: the token of each row; a draft where `local` > 0."""
    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    target: torch.Tensor
    draft: torch.Tensor | None
    argmax: torch.Tensor
    target_max: torch.Tensor
    target_sum: torch.Tensor
    draft_max: torch.Tensor
    draft_sum: torch.Tensor

    def sums(self) -> dict[str, Any]:
        """The target's logits and sums, then the draft's, by the names that most launches give them."""
        return {
            **strided(self.target, "target_logits"),
            **strided(self.target_max, "target_local_max"),
            **strided(self.target_sum, "target_local_sumexp"),
            **self.draft_logits(),
            **strided(self.draft_max, "draft_local_max"),
            **strided(self.draft_sum, "draft_local_sumexp"),
        }

    def draft_logits(self) -> dict[str, Any]:
        strides = (0, 0) if self.draft is None else self.draft.stride()
        return {
            "draft_logits_ptr": self.draft,
            "draft_logits_stride_0": strides[0],
            "draft_logits_stride_1": strides[1],
        }

    def stats(self) -> Launch:
        """The launch that fills the sums."""
        args = {
            **strided(self.argmax, "target_local_argmax"),
            **strided(self.target_max, "target_local_max"),
            **strided(self.target_sum, "target_local_sumexp"),
            **strided(self.draft_max, "draft_local_max"),
            **strided(self.draft_sum, "draft_local_sumexp"),
            **strided(self.target, "target_logits"),
            **self.draft_logits(),
            "expanded_idx_mapping_ptr": self.expanded,
            "expanded_local_pos_ptr": self.local,
            "temp_ptr": self.temperature,
            "vocab_size": VOCABULARY,
            "num_speculative_steps": STEPS,
            "BLOCK_SIZE": BLOCK,
            "HAS_DRAFT_LOGITS": self.draft is not None,
        }
        return Launch((len(self.local), BLOCKS), args)


def empty_batch(random: Random, probabilistic: bool) -> Batch:
    """Sums not yet filled."""
    counts = random.integers(1, STEPS + 2, random.integer(1, REQUESTS + 1))
    counts[0] = STEPS + 1
    requests = random.distinct(len(counts), REQUESTS)
    cu_num_logits = bounds(counts)
    rows = int(counts.sum())
    expanded = requests.repeat_interleave(counts)
    local = torch.arange(rows) - cu_num_logits[:-1].repeat_interleave(counts)
    target = random.normal(rows, VOCABULARY + 3) * 3
    target[random.normal(*target.shape) > 1.5] = -torch.inf
    target[0, :BLOCK] = -torch.inf  # a block of nothing
    drafts = random.integers(0, VOCABULARY, rows)
    likely = random.normal(rows) > -0.8
    drafts[1:] = torch.where(likely[1:], target[:-1, :VOCABULARY].argmax(-1).int(), drafts[1:])
    drafts[random.normal(rows) > 1.6] = -1
    blocks = (rows, BLOCKS)
    return Batch(
        requests,
        cu_num_logits,
        expanded,
        local,
        drafts,
        torch.tensor(random.choice([0.0, 1.0, 0.6], REQUESTS)),
        torch.randint(-(2**63), 2**63 - 1, (REQUESTS,), generator=random.generator),
        random.integers(0, 2**20, rows, dtype=torch.int64),
        target,
        random.normal(REQUESTS, STEPS, VOCABULARY) * 2 if probabilistic else None,
        torch.full(blocks, -7),
        *(torch.full(blocks, -7.0) for _ in range(4)),
    )


def batch(random: Random, probabilistic: bool) -> Batch:
    made = empty_batch(random, probabilistic)
    local_logits_stats(**made.stats().args)
    return made


def stats(random: Random) -> Launch:
    return empty_batch(random, False).stats()


def stats_of_drafts_too(random: Random) -> Launch:
    return empty_batch(random, True).stats()


def ratios(given: Batch) -> Launch:
    args = {
        "cumulative_log_p_ptr": torch.full((len(given.local),), -7.0),
        **{name: value for name, value in given.sums().items() if name.startswith("target")},
        "draft_sampled_ptr": given.drafts,
        **{name: value for name, value in given.sums().items() if name.startswith("draft")},
        "cu_num_logits_ptr": given.cu_num_logits,
        "idx_mapping_ptr": given.requests,
        "temp_ptr": given.temperature,
        "vocab_num_blocks": BLOCKS,
        "PADDED_VOCAB_NUM_BLOCKS": 8,
        "HAS_DRAFT_LOGITS": given.draft is not None,
    }
    return Launch((len(given.requests),), args)


def ratios_of_sure_drafts(random: Random) -> Launch:
    return ratios(batch(random, False))


def ratios_of_drawn_drafts(random: Random) -> Launch:
    return ratios(batch(random, True))


def mass(given: Batch) -> Launch:
    before = ratios(given).args
    cumulative_log_p(**before)
    args = {
        **strided(torch.full((len(given.local), BLOCKS), -7.0), "local_residual_mass"),
        "cumulative_log_p_ptr": before["cumulative_log_p_ptr"],
        **given.sums(),
        "draft_sampled_ptr": given.drafts,
        "expanded_idx_mapping_ptr": given.expanded,
        "expanded_local_pos_ptr": given.local,
        "temp_ptr": given.temperature,
        "vocab_size": VOCABULARY,
        "num_speculative_steps": STEPS,
        "vocab_num_blocks": BLOCKS,
        "BLOCK_SIZE": BLOCK,
        "PADDED_VOCAB_NUM_BLOCKS": 8,
    }
    return Launch((len(given.local), BLOCKS), args)


def residual_mass(random: Random) -> Launch:
    return mass(batch(random, True))


def judge(random: Random, probabilistic: bool, synthetic: bool = False, block: bool = False) -> Launch:
    given = batch(random, probabilistic)
    so_far = residual = None
    if block:
        before = ratios(given).args
        cumulative_log_p(**before)
        so_far = before["cumulative_log_p_ptr"]
        if probabilistic:
            weighed = mass(given).args
            local_residual_mass(**weighed)
            residual = weighed["local_residual_mass_ptr"]
    count, sums = len(given.requests), given.sums()
    targets = {name: value for name, value in sums.items() if name.startswith("target")}
    args = {
        **strided(torch.full((count, STEPS + 1), -7), "sampled"),
        "rejected_steps_ptr": torch.full((count,), -7, dtype=torch.int32),
        "target_rejected_logsumexp_ptr": torch.full((count,), -7.0),
        "draft_rejected_logsumexp_ptr": torch.full((count,), -7.0),
        "target_logits_ptr": targets.pop("target_logits_ptr"),
        "target_logits_stride": targets.pop("target_logits_stride"),
        **strided(given.argmax, "target_local_argmax"),
        **targets,
        "draft_sampled_ptr": given.drafts,
        **{name: value for name, value in sums.items() if name.startswith("draft")},
        "cu_num_logits_ptr": given.cu_num_logits,
        "idx_mapping_ptr": given.requests,
        "temp_ptr": given.temperature,
        "seed_ptr": given.seeds,
        "pos_ptr": given.positions,
        "synthetic_conditional_rates_ptr": torch.tensor([0.9, 0.6, 0.5, 0.8]) if synthetic else None,
        "cumulative_log_p_ptr": so_far,
        **strided(residual, "local_residual_mass"),
        "vocab_num_blocks": BLOCKS,
        "PADDED_VOCAB_NUM_BLOCKS": 8,
        "HAS_DRAFT_LOGITS": probabilistic,
        "SYNTHETIC_MODE": synthetic,
        "USE_BLOCK_VERIFICATION": block,
    }
    return Launch((count,), args)


def sure_drafts(random: Random) -> Launch:
    return judge(random, False)


def drawn_drafts(random: Random) -> Launch:
    return judge(random, True)


def synthetic_rates(random: Random) -> Launch:
    return judge(random, True, synthetic=True)


def whole_blocks_of_sure_drafts(random: Random) -> Launch:
    return judge(random, False, block=True)


def whole_blocks_of_drawn_drafts(random: Random) -> Launch:
    return judge(random, True, block=True)


def draw_again(random: Random, probabilistic: bool, block: bool = False, double: bool = False) -> Launch:
    given = batch(random, probabilistic)
    before = ratios(given).args
    cumulative_log_p(**before)
    counts = given.cu_num_logits.diff()
    stands = (random.integers(0, STEPS + 1, len(counts)) % counts).int()
    maxima = torch.full((len(counts), BLOCKS), -7.0, dtype=torch.float64 if double else torch.float32)
    args = {
        **strided(torch.full((len(counts), BLOCKS), -7), "resampled_local_argmax"),
        **strided(maxima, "resampled_local_max"),
        **strided(given.target, "target_logits"),
        "target_rejected_logsumexp_ptr": random.normal(len(counts)) + 9,
        **given.draft_logits(),
        "draft_rejected_logsumexp_ptr": random.normal(len(counts)) + 9,
        "rejected_step_ptr": stands,
        "cu_num_logits_ptr": given.cu_num_logits,
        "expanded_idx_mapping_ptr": given.expanded,
        "draft_sampled_ptr": given.drafts,
        "temp_ptr": given.temperature,
        "seed_ptr": given.seeds,
        "pos_ptr": given.positions,
        "cumulative_log_p_ptr": before["cumulative_log_p_ptr"] if block else None,
        "contexts_ptr": None,
        "contexts_stride": 0,
        "watermarking_ptr": None,
        "watermarking_skip_mask_ptr": None,
        "watermark_key_0": 0,
        "watermark_key_1": 0,
        "vocab_size": VOCABULARY,
        "BLOCK_SIZE": BLOCK,
        "HAS_DRAFT_LOGITS": probabilistic,
        "USE_FP64": double,
        "USE_BLOCK_VERIFICATION": block,
        "CONTEXT_WIDTH": 1,
        "WATERMARK": False,
        "DEDUPLICATE_CONTEXTS": False,
    }
    return Launch((len(counts), BLOCKS), args)


def without_the_draft(random: Random) -> Launch:
    return draw_again(random, False)


def from_the_residual(random: Random) -> Launch:
    return draw_again(random, True)


def from_the_residual_of_a_block(random: Random) -> Launch:
    return draw_again(random, True, block=True, double=True)


def insert(random: Random) -> Launch:
    given = empty_batch(random, False)
    counts = given.cu_num_logits.diff()
    maxima = random.normal(len(counts), BLOCKS)
    maxima[random.normal(*maxima.shape) > 1.5] = torch.nan
    args = {
        **strided(torch.full((len(counts), STEPS + 1), -7), "sampled"),
        "num_sampled_ptr": (random.integers(0, STEPS + 1, len(counts)) % counts).int(),
        **strided(random.integers(0, VOCABULARY, len(counts), BLOCKS, dtype=torch.int64), "resampled_local_argmax"),
        **strided(maxima, "resampled_local_max"),
        "resample_num_blocks": BLOCKS,
        "cu_num_logits_ptr": given.cu_num_logits,
        "expanded_idx_mapping_ptr": given.expanded,
        "temp_ptr": given.temperature,
        "PADDED_RESAMPLE_NUM_BLOCKS": 8,
    }
    return Launch((len(counts),), args)


def gather(random: Random) -> Launch:
    given = empty_batch(random, False)
    rows = len(given.local)
    args = {
        "draft_sampled_ptr": torch.full((rows,), -7, dtype=torch.int32),
        "pos_ptr": torch.full((rows,), -7),
        "input_ids_ptr": random.integers(0, VOCABULARY, 2 * rows),
        "positions_ptr": random.integers(0, 40, 2 * rows, dtype=torch.int64),
        "logits_indices_ptr": random.distinct(rows, 2 * rows),
        "expanded_idx_mapping_ptr": given.expanded,
        "expanded_local_pos_ptr": given.local.int(),
        "prefill_len_ptr": random.integers(5, 30, REQUESTS),
        "num_logits": rows,
        "BLOCK_SIZE": 8,
    }
    return Launch((-(-rows // 8),), args)


def flatten(random: Random) -> Launch:
    given = empty_batch(random, False)
    counts = given.cu_num_logits.diff()
    args = {
        "flat_sampled_ptr": torch.full((len(given.local),), -7),
        **strided(random.integers(0, VOCABULARY, len(counts), STEPS + 1, dtype=torch.int64), "sampled"),
        "num_sampled_ptr": (random.integers(0, STEPS + 2, len(counts)) % (counts + 1)).int(),
        "cu_num_logits_ptr": given.cu_num_logits,
    }
    return Launch((len(counts),), args)


def block_inputs(random: Random, anchored: bool, ranks: int = 1) -> Launch:
    count, size, width, most, tokens = random.integer(1, 6), 4, STEPS + (not anchored), 8, 90
    lengths = random.integers(1, 9, count)
    starts = random.integers(0, 30, count)
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)])
    table = random.integers(1, 50, count, 10)
    table[random.normal(*table.shape) > 1] = 0

    def unwritten(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, -7, dtype=dtype)

    args = {
        "out_input_ids_ptr": unwritten(tokens, dtype=torch.int32),
        "out_query_positions_ptr": unwritten(tokens),
        "out_query_start_loc_ptr": unwritten(most + 1, dtype=torch.int32),
        "out_seq_lens_ptr": unwritten(most, dtype=torch.int32),
        "out_query_slot_mapping_ptr": unwritten(tokens),
        "out_context_positions_ptr": unwritten(tokens),
        "out_context_slot_mapping_ptr": unwritten(tokens),
        "out_sample_indices_ptr": unwritten(most * STEPS),
        "out_sample_pos_ptr": unwritten(most * STEPS),
        "out_sample_idx_mapping_ptr": unwritten(most * STEPS),
        "out_temperature_ptr": random.normal(most),
        "out_seeds_ptr": random.integers(0, 99, most, dtype=torch.int64),
        "target_positions_ptr": positions,
        "target_query_start_loc_ptr": bounds(lengths),
        "idx_mapping_ptr": random.distinct(count, most),
        "last_sampled_ptr": random.integers(100, 199, most, 1, dtype=torch.int64),
        "next_prefill_tokens_ptr": random.integers(200, 299, 2, most),
        "num_sampled_ptr": random.integers(0, 3, count),
        "num_rejected_ptr": (random.integers(0, STEPS, count) % lengths).int(),
        "temperature_ptr": random.normal(most),
        "seeds_ptr": random.integers(0, 99, most, dtype=torch.int64),
        "block_table_ptr": table,
        "block_table_stride": table.stride(0),
        "parallel_drafting_token_id": 777,
        "block_size": size,
        "num_query_per_req": width,
        "num_speculative_steps": STEPS,
        "max_num_reqs": most,
        "max_num_tokens": tokens,
        "max_model_len": 36,
        "cp_rank": ranks - 1,
        "SAMPLE_FROM_ANCHOR": anchored,
        "PAD_SLOT_ID": -1,
        "CP_SIZE": ranks,
        "CP_INTERLEAVE": 1 if ranks == 1 else 2,
        "BLOCK_SIZE": 4,
    }
    return Launch((count, -(-(int(lengths.max()) + width) // 4)), args)


def sampled_from_anchor(random: Random) -> Launch:
    return block_inputs(random, anchored=True)


def sampled_after_anchor(random: Random) -> Launch:
    return block_inputs(random, anchored=False)


def of_one_rank_in_two(random: Random) -> Launch:
    return block_inputs(random, anchored=True, ranks=2)


CASES = (
    *(
        Case("spec_decode.dflash.speculator._prepare_dflash_inputs_kernel", make)
        for make in (sampled_from_anchor, sampled_after_anchor, of_one_rank_in_two)
    ),
    Case(f"{SAMPLER}._flatten_sampled_kernel", flatten),
    Case(f"{SAMPLER}._gather_draft_sampled_kernel", gather),
    *(
        Case(f"{UTILS}._compute_local_logits_stats_kernel", make, tolerance=2e-6)
        for make in (stats, stats_of_drafts_too)
    ),
    *(
        Case(f"{UTILS}._compute_cumulative_log_p_kernel", make, tolerance=4e-6)
        for make in (ratios_of_sure_drafts, ratios_of_drawn_drafts)
    ),
    Case(f"{UTILS}._compute_local_residual_mass_kernel", residual_mass, tolerance=4e-6),
    *(
        Case(f"{UTILS}._rejection_kernel", make, tolerance=4e-6)
        for make in (
            sure_drafts,
            drawn_drafts,
            synthetic_rates,
            whole_blocks_of_sure_drafts,
            whole_blocks_of_drawn_drafts,
        )
    ),
    *(
        Case(f"{UTILS}._resample_kernel", make, tolerance=4e-6)
        for make in (without_the_draft, from_the_residual, from_the_residual_of_a_block)
    ),
    Case(f"{UTILS}._insert_resampled_kernel", insert),
)
