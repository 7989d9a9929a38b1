"""The fused decoder's work between matrix products, and the softmax over the vocabulary, in C++."""
