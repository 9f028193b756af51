"""The model room: one decoder for Llama, Qwen2 and Qwen3, its shardings and its Hugging Face names.

Pure but for the folders that hf.py reads and writes.
"""
