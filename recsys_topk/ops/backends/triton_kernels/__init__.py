"""Triton kernels for GPUs, one file per operation, each registered with `torch.library`.

They are imported at the first call with CUDA tensors, if triton is installed. The tests compile them for sm_80 and
sm_90 and run them in Triton's interpreter. They were not run on a GPU.
"""
