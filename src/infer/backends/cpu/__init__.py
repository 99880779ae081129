"""Native CPU kernels: C++ built for this machine, the same bits whatever a request is batched with."""
