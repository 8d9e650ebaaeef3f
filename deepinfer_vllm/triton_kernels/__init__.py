"""Operations of the portable model as Triton kernels, each with the PyTorch code it stands for as its reference.

`attention` and `gates` import Triton, so nothing imports them where `choice.chosen` says no.
"""
