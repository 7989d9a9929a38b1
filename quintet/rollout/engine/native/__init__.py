"""The C++ kernels of the embedded engine: compiled on first use for the machine at hand, and the model over them."""
