"""The Megatron backend: megatron-core trains. megatron-core is imported here and nowhere else."""
