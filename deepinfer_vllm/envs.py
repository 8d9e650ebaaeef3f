"""stub"""
import os
def __getattr__(n):
    return {"DEEPINFER_VLLM_MODEL": os.environ.get("DEEPINFER_VLLM_MODEL", "auto"), "DEEPINFER_VLLM_DECODER_REPLAY": os.environ.get("DEEPINFER_VLLM_DECODER_REPLAY", "1") == "1", "DEEPINFER_VLLM_NUMERICS": os.environ.get("DEEPINFER_VLLM_NUMERICS", "plain")}[n]
