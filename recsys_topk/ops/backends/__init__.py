"""The threads, the compiler and the machine code of compiled loops, and the kernels for CPUs and GPUs."""
