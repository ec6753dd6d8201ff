"""The attention as a kernel of Hugging Face's Kernels Hub: a folder that imports none of ours."""
