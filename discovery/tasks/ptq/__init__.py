"""The quantization task: evolved hooks under the frozen contract."""
