"""Kernels for GPUs in Triton, one file per operation, each registered with `torch.library`.

Imported at the first call that they serve: CUDA tensors with triton installed. Compiled for sm_80 and sm_90 and run in
Triton's interpreter by the tests; not run on a GPU.
"""
