# Completion of slime for fish; made by `slime completions fish`.
function __slime_runs
    set -l root runs
    set -q SLIME_RUNS; and set root $SLIME_RUNS
    for file in $root/*/run.json
        basename (dirname $file)
    end
end
complete -c slime -f
complete -c slime -n __fish_use_subcommand -l version -l debug -l help
complete -c slime -n __fish_use_subcommand -a run -d 'Do every stage in order - data, model, SFT, the RL loop on Ray, export'
complete -c slime -n __fish_use_subcommand -a plan -d 'Say what is wrong with a recipe, all at once, and what it will take'
complete -c slime -n __fish_use_subcommand -a init -d 'Write a commented recipe into the current folder'
complete -c slime -n __fish_use_subcommand -a download -d 'Fetch a model or data set into the shared cache (or --out), and check that it is what it says'
complete -c slime -n __fish_use_subcommand -a convert -d 'Convert a model between Hugging Face and Megatron; the result carries a certificate. Run again, it continues'
complete -c slime -n __fish_use_subcommand -a prepare-data -d 'Prepare prompts and demonstrations - validate, de-duplicate, hold out, count'
complete -c slime -n __fish_use_subcommand -a serve -d 'Serve a model or a runs weights with the embedded engine'
complete -c slime -n __fish_use_subcommand -a rollout -d 'Generate and score answers - the next step of a run, or any prompt file with any model'
complete -c slime -n __fish_use_subcommand -a train -d 'Train on the samples of the next step, or on demonstrations'
complete -c slime -n __fish_use_subcommand -a eval -d 'Score held-out problems, sampled and greedy'
complete -c slime -n __fish_use_subcommand -a export -d 'Write weights as an HF folder with tokenizer, chat template and model card; upload it if asked to'
complete -c slime -n __fish_use_subcommand -a watch -d 'Follow a run live, until it ends. The exit code says how it ended'
complete -c slime -n __fish_use_subcommand -a report -d 'Write a run as one HTML file - curves, stages, answers before and after, recipe'
complete -c slime -n __fish_use_subcommand -a runs -d 'List runs with status, step and reward, or show one'
complete -c slime -n __fish_use_subcommand -a recipes -d 'Show the recipes that come with slime, and everything a recipe can say'
complete -c slime -n __fish_use_subcommand -a models -d 'List known models, or show one with its memory, FLOPs and Megatron arguments'
complete -c slime -n __fish_use_subcommand -a reward -d 'Score samples with a reward function, or check it on gold answers'
complete -c slime -n __fish_use_subcommand -a doctor -d 'Check Python, packages, torch, GPUs, memory, disk and ports'
complete -c slime -n __fish_use_subcommand -a completions -d 'Print the completion script of a shell'
complete -c slime -n '__fish_seen_subcommand_from run' -l recipe -r -F -a 'grpo quickstart reverse sft'
complete -c slime -n '__fish_seen_subcommand_from run' -l run -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from run' -s r -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from run' -l model
complete -c slime -n '__fish_seen_subcommand_from run' -l set -x -a 'title= source= seed= steps= model.name= model.path= model.revision= model.source= model.init_std= model.tokenizer_vocab= model.dtype= model.trust_remote_code= data.train= data.source= data.source_args= data.count= data.holdout= data.demonstrations= data.demonstration_args= data.input_key= data.label_key= data.messages_key= data.metadata_key= data.tool_key= data.system_prompt= data.apply_chat_template= data.max_prompt_tokens= data.skip_broken= data.shuffle= rollout.batch_size= rollout.n_samples_per_prompt= rollout.max_response_tokens= rollout.temperature= rollout.top_p= rollout.top_k= rollout.min_p= rollout.stop= rollout.stop_token_ids= rollout.over_sampling_batch_size= rollout.dynamic_filter= rollout.max_filtered_rounds= rollout.custom_generate= rollout.concurrency= rollout.request_timeout_s= rollout.max_retries= rollout.max_failed_fraction= reward.type= reward.path= reward.key= reward.group= reward.timeout_s= algo.name= algo.std_normalization= algo.eps_clip= algo.eps_clip_high= algo.aggregation= algo.constant_length= algo.kl_coef= algo.kl_type= algo.entropy_coef= trainer.backend= trainer.processes= trainer.threads= trainer.global_batch_size= trainer.steps_per_rollout= trainer.max_tokens_per_micro_batch= trainer.lr= trainer.warmup_steps= trainer.lr_schedule= trainer.min_lr_ratio= trainer.beta1= trainer.beta2= trainer.adam_eps= trainer.weight_decay= trainer.clip_grad= trainer.activation_checkpointing= trainer.logits_chunk_tokens= trainer.shared_prefix= sft.steps= sft.batch_size= sft.lr= sft.warmup_steps= sft.lr_schedule= sft.min_lr_ratio= sft.data= eval.interval= eval.sets= eval.n_samples_per_prompt= eval.temperature= eval.greedy= eval.max_response_tokens= eval.max_prompts= engine.backend= engine.urls= engine.replicas= engine.threads= engine.slots= engine.max_context= engine.dtype= engine.host= engine.start_timeout_s= sync.kind= sync.timeout_s= checkpoint.interval= checkpoint.keep= cluster.backend= cluster.address= cluster.start_timeout_s= gates.action= gates.max_logprob_gap= gates.first_step_kl= gates.max_zero_variance= observe.tensorboard= observe.wandb_project= export.dtype= export.max_shard_bytes= megatron= sglang='
complete -c slime -n '__fish_seen_subcommand_from run' -l resume
complete -c slime -n '__fish_seen_subcommand_from run' -l overwrite
complete -c slime -n '__fish_seen_subcommand_from run' -l until
complete -c slime -n '__fish_seen_subcommand_from run' -l json
complete -c slime -n '__fish_seen_subcommand_from run' -l help
complete -c slime -n '__fish_seen_subcommand_from plan' -l recipe -r -F -a 'grpo quickstart reverse sft'
complete -c slime -n '__fish_seen_subcommand_from plan' -l run -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from plan' -s r -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from plan' -l model
complete -c slime -n '__fish_seen_subcommand_from plan' -l set -x -a 'title= source= seed= steps= model.name= model.path= model.revision= model.source= model.init_std= model.tokenizer_vocab= model.dtype= model.trust_remote_code= data.train= data.source= data.source_args= data.count= data.holdout= data.demonstrations= data.demonstration_args= data.input_key= data.label_key= data.messages_key= data.metadata_key= data.tool_key= data.system_prompt= data.apply_chat_template= data.max_prompt_tokens= data.skip_broken= data.shuffle= rollout.batch_size= rollout.n_samples_per_prompt= rollout.max_response_tokens= rollout.temperature= rollout.top_p= rollout.top_k= rollout.min_p= rollout.stop= rollout.stop_token_ids= rollout.over_sampling_batch_size= rollout.dynamic_filter= rollout.max_filtered_rounds= rollout.custom_generate= rollout.concurrency= rollout.request_timeout_s= rollout.max_retries= rollout.max_failed_fraction= reward.type= reward.path= reward.key= reward.group= reward.timeout_s= algo.name= algo.std_normalization= algo.eps_clip= algo.eps_clip_high= algo.aggregation= algo.constant_length= algo.kl_coef= algo.kl_type= algo.entropy_coef= trainer.backend= trainer.processes= trainer.threads= trainer.global_batch_size= trainer.steps_per_rollout= trainer.max_tokens_per_micro_batch= trainer.lr= trainer.warmup_steps= trainer.lr_schedule= trainer.min_lr_ratio= trainer.beta1= trainer.beta2= trainer.adam_eps= trainer.weight_decay= trainer.clip_grad= trainer.activation_checkpointing= trainer.logits_chunk_tokens= trainer.shared_prefix= sft.steps= sft.batch_size= sft.lr= sft.warmup_steps= sft.lr_schedule= sft.min_lr_ratio= sft.data= eval.interval= eval.sets= eval.n_samples_per_prompt= eval.temperature= eval.greedy= eval.max_response_tokens= eval.max_prompts= engine.backend= engine.urls= engine.replicas= engine.threads= engine.slots= engine.max_context= engine.dtype= engine.host= engine.start_timeout_s= sync.kind= sync.timeout_s= checkpoint.interval= checkpoint.keep= cluster.backend= cluster.address= cluster.start_timeout_s= gates.action= gates.max_logprob_gap= gates.first_step_kl= gates.max_zero_variance= observe.tensorboard= observe.wandb_project= export.dtype= export.max_shard_bytes= megatron= sglang='
complete -c slime -n '__fish_seen_subcommand_from plan' -l measure
complete -c slime -n '__fish_seen_subcommand_from plan' -l json
complete -c slime -n '__fish_seen_subcommand_from plan' -l help
complete -c slime -n '__fish_seen_subcommand_from init' -l from -r -F -a 'grpo quickstart reverse sft'
complete -c slime -n '__fish_seen_subcommand_from init' -l out
complete -c slime -n '__fish_seen_subcommand_from init' -s o
complete -c slime -n '__fish_seen_subcommand_from init' -l json
complete -c slime -n '__fish_seen_subcommand_from init' -l help
complete -c slime -n '__fish_seen_subcommand_from download' -l revision
complete -c slime -n '__fish_seen_subcommand_from download' -l dataset
complete -c slime -n '__fish_seen_subcommand_from download' -l out
complete -c slime -n '__fish_seen_subcommand_from download' -s o
complete -c slime -n '__fish_seen_subcommand_from download' -l allow
complete -c slime -n '__fish_seen_subcommand_from download' -l ignore
complete -c slime -n '__fish_seen_subcommand_from download' -l offline
complete -c slime -n '__fish_seen_subcommand_from download' -l endpoint
complete -c slime -n '__fish_seen_subcommand_from download' -l json
complete -c slime -n '__fish_seen_subcommand_from download' -l help
complete -c slime -n '__fish_seen_subcommand_from convert' -l to
complete -c slime -n '__fish_seen_subcommand_from convert' -l model
complete -c slime -n '__fish_seen_subcommand_from convert' -l hf
complete -c slime -n '__fish_seen_subcommand_from convert' -l from -r -F -a 'grpo quickstart reverse sft'
complete -c slime -n '__fish_seen_subcommand_from convert' -l out
complete -c slime -n '__fish_seen_subcommand_from convert' -s o
complete -c slime -n '__fish_seen_subcommand_from convert' -l dtype
complete -c slime -n '__fish_seen_subcommand_from convert' -l quantize
complete -c slime -n '__fish_seen_subcommand_from convert' -l verify
complete -c slime -n '__fish_seen_subcommand_from convert' -l dry-run
complete -c slime -n '__fish_seen_subcommand_from convert' -l json
complete -c slime -n '__fish_seen_subcommand_from convert' -l help
complete -c slime -n '__fish_seen_subcommand_from prepare-data' -l run -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from prepare-data' -s r -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from prepare-data' -l recipe -r -F -a 'grpo quickstart reverse sft'
complete -c slime -n '__fish_seen_subcommand_from prepare-data' -l input
complete -c slime -n '__fish_seen_subcommand_from prepare-data' -l out
complete -c slime -n '__fish_seen_subcommand_from prepare-data' -s o
complete -c slime -n '__fish_seen_subcommand_from prepare-data' -l model
complete -c slime -n '__fish_seen_subcommand_from prepare-data' -l set -x -a 'title= source= seed= steps= model.name= model.path= model.revision= model.source= model.init_std= model.tokenizer_vocab= model.dtype= model.trust_remote_code= data.train= data.source= data.source_args= data.count= data.holdout= data.demonstrations= data.demonstration_args= data.input_key= data.label_key= data.messages_key= data.metadata_key= data.tool_key= data.system_prompt= data.apply_chat_template= data.max_prompt_tokens= data.skip_broken= data.shuffle= rollout.batch_size= rollout.n_samples_per_prompt= rollout.max_response_tokens= rollout.temperature= rollout.top_p= rollout.top_k= rollout.min_p= rollout.stop= rollout.stop_token_ids= rollout.over_sampling_batch_size= rollout.dynamic_filter= rollout.max_filtered_rounds= rollout.custom_generate= rollout.concurrency= rollout.request_timeout_s= rollout.max_retries= rollout.max_failed_fraction= reward.type= reward.path= reward.key= reward.group= reward.timeout_s= algo.name= algo.std_normalization= algo.eps_clip= algo.eps_clip_high= algo.aggregation= algo.constant_length= algo.kl_coef= algo.kl_type= algo.entropy_coef= trainer.backend= trainer.processes= trainer.threads= trainer.global_batch_size= trainer.steps_per_rollout= trainer.max_tokens_per_micro_batch= trainer.lr= trainer.warmup_steps= trainer.lr_schedule= trainer.min_lr_ratio= trainer.beta1= trainer.beta2= trainer.adam_eps= trainer.weight_decay= trainer.clip_grad= trainer.activation_checkpointing= trainer.logits_chunk_tokens= trainer.shared_prefix= sft.steps= sft.batch_size= sft.lr= sft.warmup_steps= sft.lr_schedule= sft.min_lr_ratio= sft.data= eval.interval= eval.sets= eval.n_samples_per_prompt= eval.temperature= eval.greedy= eval.max_response_tokens= eval.max_prompts= engine.backend= engine.urls= engine.replicas= engine.threads= engine.slots= engine.max_context= engine.dtype= engine.host= engine.start_timeout_s= sync.kind= sync.timeout_s= checkpoint.interval= checkpoint.keep= cluster.backend= cluster.address= cluster.start_timeout_s= gates.action= gates.max_logprob_gap= gates.first_step_kl= gates.max_zero_variance= observe.tensorboard= observe.wandb_project= export.dtype= export.max_shard_bytes= megatron= sglang='
complete -c slime -n '__fish_seen_subcommand_from prepare-data' -l show
complete -c slime -n '__fish_seen_subcommand_from prepare-data' -l list
complete -c slime -n '__fish_seen_subcommand_from prepare-data' -l json
complete -c slime -n '__fish_seen_subcommand_from prepare-data' -l help
complete -c slime -n '__fish_seen_subcommand_from serve' -l run -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from serve' -s r -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from serve' -l model
complete -c slime -n '__fish_seen_subcommand_from serve' -l step
complete -c slime -n '__fish_seen_subcommand_from serve' -l host
complete -c slime -n '__fish_seen_subcommand_from serve' -l port
complete -c slime -n '__fish_seen_subcommand_from serve' -l api-key
complete -c slime -n '__fish_seen_subcommand_from serve' -l recipe -r -F -a 'grpo quickstart reverse sft'
complete -c slime -n '__fish_seen_subcommand_from serve' -l set -x -a 'title= source= seed= steps= model.name= model.path= model.revision= model.source= model.init_std= model.tokenizer_vocab= model.dtype= model.trust_remote_code= data.train= data.source= data.source_args= data.count= data.holdout= data.demonstrations= data.demonstration_args= data.input_key= data.label_key= data.messages_key= data.metadata_key= data.tool_key= data.system_prompt= data.apply_chat_template= data.max_prompt_tokens= data.skip_broken= data.shuffle= rollout.batch_size= rollout.n_samples_per_prompt= rollout.max_response_tokens= rollout.temperature= rollout.top_p= rollout.top_k= rollout.min_p= rollout.stop= rollout.stop_token_ids= rollout.over_sampling_batch_size= rollout.dynamic_filter= rollout.max_filtered_rounds= rollout.custom_generate= rollout.concurrency= rollout.request_timeout_s= rollout.max_retries= rollout.max_failed_fraction= reward.type= reward.path= reward.key= reward.group= reward.timeout_s= algo.name= algo.std_normalization= algo.eps_clip= algo.eps_clip_high= algo.aggregation= algo.constant_length= algo.kl_coef= algo.kl_type= algo.entropy_coef= trainer.backend= trainer.processes= trainer.threads= trainer.global_batch_size= trainer.steps_per_rollout= trainer.max_tokens_per_micro_batch= trainer.lr= trainer.warmup_steps= trainer.lr_schedule= trainer.min_lr_ratio= trainer.beta1= trainer.beta2= trainer.adam_eps= trainer.weight_decay= trainer.clip_grad= trainer.activation_checkpointing= trainer.logits_chunk_tokens= trainer.shared_prefix= sft.steps= sft.batch_size= sft.lr= sft.warmup_steps= sft.lr_schedule= sft.min_lr_ratio= sft.data= eval.interval= eval.sets= eval.n_samples_per_prompt= eval.temperature= eval.greedy= eval.max_response_tokens= eval.max_prompts= engine.backend= engine.urls= engine.replicas= engine.threads= engine.slots= engine.max_context= engine.dtype= engine.host= engine.start_timeout_s= sync.kind= sync.timeout_s= checkpoint.interval= checkpoint.keep= cluster.backend= cluster.address= cluster.start_timeout_s= gates.action= gates.max_logprob_gap= gates.first_step_kl= gates.max_zero_variance= observe.tensorboard= observe.wandb_project= export.dtype= export.max_shard_bytes= megatron= sglang='
complete -c slime -n '__fish_seen_subcommand_from serve' -l help
complete -c slime -n '__fish_seen_subcommand_from rollout' -l run -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from rollout' -s r -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from rollout' -l model
complete -c slime -n '__fish_seen_subcommand_from rollout' -l prompts
complete -c slime -n '__fish_seen_subcommand_from rollout' -l out
complete -c slime -n '__fish_seen_subcommand_from rollout' -s o
complete -c slime -n '__fish_seen_subcommand_from rollout' -l recipe -r -F -a 'grpo quickstart reverse sft'
complete -c slime -n '__fish_seen_subcommand_from rollout' -l set -x -a 'title= source= seed= steps= model.name= model.path= model.revision= model.source= model.init_std= model.tokenizer_vocab= model.dtype= model.trust_remote_code= data.train= data.source= data.source_args= data.count= data.holdout= data.demonstrations= data.demonstration_args= data.input_key= data.label_key= data.messages_key= data.metadata_key= data.tool_key= data.system_prompt= data.apply_chat_template= data.max_prompt_tokens= data.skip_broken= data.shuffle= rollout.batch_size= rollout.n_samples_per_prompt= rollout.max_response_tokens= rollout.temperature= rollout.top_p= rollout.top_k= rollout.min_p= rollout.stop= rollout.stop_token_ids= rollout.over_sampling_batch_size= rollout.dynamic_filter= rollout.max_filtered_rounds= rollout.custom_generate= rollout.concurrency= rollout.request_timeout_s= rollout.max_retries= rollout.max_failed_fraction= reward.type= reward.path= reward.key= reward.group= reward.timeout_s= algo.name= algo.std_normalization= algo.eps_clip= algo.eps_clip_high= algo.aggregation= algo.constant_length= algo.kl_coef= algo.kl_type= algo.entropy_coef= trainer.backend= trainer.processes= trainer.threads= trainer.global_batch_size= trainer.steps_per_rollout= trainer.max_tokens_per_micro_batch= trainer.lr= trainer.warmup_steps= trainer.lr_schedule= trainer.min_lr_ratio= trainer.beta1= trainer.beta2= trainer.adam_eps= trainer.weight_decay= trainer.clip_grad= trainer.activation_checkpointing= trainer.logits_chunk_tokens= trainer.shared_prefix= sft.steps= sft.batch_size= sft.lr= sft.warmup_steps= sft.lr_schedule= sft.min_lr_ratio= sft.data= eval.interval= eval.sets= eval.n_samples_per_prompt= eval.temperature= eval.greedy= eval.max_response_tokens= eval.max_prompts= engine.backend= engine.urls= engine.replicas= engine.threads= engine.slots= engine.max_context= engine.dtype= engine.host= engine.start_timeout_s= sync.kind= sync.timeout_s= checkpoint.interval= checkpoint.keep= cluster.backend= cluster.address= cluster.start_timeout_s= gates.action= gates.max_logprob_gap= gates.first_step_kl= gates.max_zero_variance= observe.tensorboard= observe.wandb_project= export.dtype= export.max_shard_bytes= megatron= sglang='
complete -c slime -n '__fish_seen_subcommand_from rollout' -l json
complete -c slime -n '__fish_seen_subcommand_from rollout' -l help
complete -c slime -n '__fish_seen_subcommand_from train' -l run -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from train' -s r -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from train' -l stage
complete -c slime -n '__fish_seen_subcommand_from train' -l set -x -a 'title= source= seed= steps= model.name= model.path= model.revision= model.source= model.init_std= model.tokenizer_vocab= model.dtype= model.trust_remote_code= data.train= data.source= data.source_args= data.count= data.holdout= data.demonstrations= data.demonstration_args= data.input_key= data.label_key= data.messages_key= data.metadata_key= data.tool_key= data.system_prompt= data.apply_chat_template= data.max_prompt_tokens= data.skip_broken= data.shuffle= rollout.batch_size= rollout.n_samples_per_prompt= rollout.max_response_tokens= rollout.temperature= rollout.top_p= rollout.top_k= rollout.min_p= rollout.stop= rollout.stop_token_ids= rollout.over_sampling_batch_size= rollout.dynamic_filter= rollout.max_filtered_rounds= rollout.custom_generate= rollout.concurrency= rollout.request_timeout_s= rollout.max_retries= rollout.max_failed_fraction= reward.type= reward.path= reward.key= reward.group= reward.timeout_s= algo.name= algo.std_normalization= algo.eps_clip= algo.eps_clip_high= algo.aggregation= algo.constant_length= algo.kl_coef= algo.kl_type= algo.entropy_coef= trainer.backend= trainer.processes= trainer.threads= trainer.global_batch_size= trainer.steps_per_rollout= trainer.max_tokens_per_micro_batch= trainer.lr= trainer.warmup_steps= trainer.lr_schedule= trainer.min_lr_ratio= trainer.beta1= trainer.beta2= trainer.adam_eps= trainer.weight_decay= trainer.clip_grad= trainer.activation_checkpointing= trainer.logits_chunk_tokens= trainer.shared_prefix= sft.steps= sft.batch_size= sft.lr= sft.warmup_steps= sft.lr_schedule= sft.min_lr_ratio= sft.data= eval.interval= eval.sets= eval.n_samples_per_prompt= eval.temperature= eval.greedy= eval.max_response_tokens= eval.max_prompts= engine.backend= engine.urls= engine.replicas= engine.threads= engine.slots= engine.max_context= engine.dtype= engine.host= engine.start_timeout_s= sync.kind= sync.timeout_s= checkpoint.interval= checkpoint.keep= cluster.backend= cluster.address= cluster.start_timeout_s= gates.action= gates.max_logprob_gap= gates.first_step_kl= gates.max_zero_variance= observe.tensorboard= observe.wandb_project= export.dtype= export.max_shard_bytes= megatron= sglang='
complete -c slime -n '__fish_seen_subcommand_from train' -l json
complete -c slime -n '__fish_seen_subcommand_from train' -l help
complete -c slime -n '__fish_seen_subcommand_from eval' -l run -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from eval' -s r -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from eval' -l model
complete -c slime -n '__fish_seen_subcommand_from eval' -l step
complete -c slime -n '__fish_seen_subcommand_from eval' -l data
complete -c slime -n '__fish_seen_subcommand_from eval' -l recipe -r -F -a 'grpo quickstart reverse sft'
complete -c slime -n '__fish_seen_subcommand_from eval' -l set -x -a 'title= source= seed= steps= model.name= model.path= model.revision= model.source= model.init_std= model.tokenizer_vocab= model.dtype= model.trust_remote_code= data.train= data.source= data.source_args= data.count= data.holdout= data.demonstrations= data.demonstration_args= data.input_key= data.label_key= data.messages_key= data.metadata_key= data.tool_key= data.system_prompt= data.apply_chat_template= data.max_prompt_tokens= data.skip_broken= data.shuffle= rollout.batch_size= rollout.n_samples_per_prompt= rollout.max_response_tokens= rollout.temperature= rollout.top_p= rollout.top_k= rollout.min_p= rollout.stop= rollout.stop_token_ids= rollout.over_sampling_batch_size= rollout.dynamic_filter= rollout.max_filtered_rounds= rollout.custom_generate= rollout.concurrency= rollout.request_timeout_s= rollout.max_retries= rollout.max_failed_fraction= reward.type= reward.path= reward.key= reward.group= reward.timeout_s= algo.name= algo.std_normalization= algo.eps_clip= algo.eps_clip_high= algo.aggregation= algo.constant_length= algo.kl_coef= algo.kl_type= algo.entropy_coef= trainer.backend= trainer.processes= trainer.threads= trainer.global_batch_size= trainer.steps_per_rollout= trainer.max_tokens_per_micro_batch= trainer.lr= trainer.warmup_steps= trainer.lr_schedule= trainer.min_lr_ratio= trainer.beta1= trainer.beta2= trainer.adam_eps= trainer.weight_decay= trainer.clip_grad= trainer.activation_checkpointing= trainer.logits_chunk_tokens= trainer.shared_prefix= sft.steps= sft.batch_size= sft.lr= sft.warmup_steps= sft.lr_schedule= sft.min_lr_ratio= sft.data= eval.interval= eval.sets= eval.n_samples_per_prompt= eval.temperature= eval.greedy= eval.max_response_tokens= eval.max_prompts= engine.backend= engine.urls= engine.replicas= engine.threads= engine.slots= engine.max_context= engine.dtype= engine.host= engine.start_timeout_s= sync.kind= sync.timeout_s= checkpoint.interval= checkpoint.keep= cluster.backend= cluster.address= cluster.start_timeout_s= gates.action= gates.max_logprob_gap= gates.first_step_kl= gates.max_zero_variance= observe.tensorboard= observe.wandb_project= export.dtype= export.max_shard_bytes= megatron= sglang='
complete -c slime -n '__fish_seen_subcommand_from eval' -l json
complete -c slime -n '__fish_seen_subcommand_from eval' -l help
complete -c slime -n '__fish_seen_subcommand_from export' -l run -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from export' -s r -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from export' -l from -r -F -a 'grpo quickstart reverse sft'
complete -c slime -n '__fish_seen_subcommand_from export' -l step
complete -c slime -n '__fish_seen_subcommand_from export' -l out
complete -c slime -n '__fish_seen_subcommand_from export' -s o
complete -c slime -n '__fish_seen_subcommand_from export' -l dtype
complete -c slime -n '__fish_seen_subcommand_from export' -l quantize
complete -c slime -n '__fish_seen_subcommand_from export' -l max-shard-size
complete -c slime -n '__fish_seen_subcommand_from export' -l push
complete -c slime -n '__fish_seen_subcommand_from export' -l private
complete -c slime -n '__fish_seen_subcommand_from export' -l json
complete -c slime -n '__fish_seen_subcommand_from export' -l help
complete -c slime -n '__fish_seen_subcommand_from watch' -l run -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from watch' -s r -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from watch' -l json
complete -c slime -n '__fish_seen_subcommand_from watch' -l help
complete -c slime -n '__fish_seen_subcommand_from report' -l run -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from report' -s r -x -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from report' -l out
complete -c slime -n '__fish_seen_subcommand_from report' -s o
complete -c slime -n '__fish_seen_subcommand_from report' -l bundle
complete -c slime -n '__fish_seen_subcommand_from report' -l json
complete -c slime -n '__fish_seen_subcommand_from report' -l help
complete -c slime -n '__fish_seen_subcommand_from runs' -a show
complete -c slime -n '__fish_seen_subcommand_from runs' -l json
complete -c slime -n '__fish_seen_subcommand_from runs' -l help
complete -c slime -n '__fish_seen_subcommand_from recipes' -a show
complete -c slime -n '__fish_seen_subcommand_from recipes' -a copy
complete -c slime -n '__fish_seen_subcommand_from recipes' -l fields
complete -c slime -n '__fish_seen_subcommand_from recipes' -l algorithms
complete -c slime -n '__fish_seen_subcommand_from recipes' -l resolved
complete -c slime -n '__fish_seen_subcommand_from recipes' -l model
complete -c slime -n '__fish_seen_subcommand_from recipes' -l set -x -a 'title= source= seed= steps= model.name= model.path= model.revision= model.source= model.init_std= model.tokenizer_vocab= model.dtype= model.trust_remote_code= data.train= data.source= data.source_args= data.count= data.holdout= data.demonstrations= data.demonstration_args= data.input_key= data.label_key= data.messages_key= data.metadata_key= data.tool_key= data.system_prompt= data.apply_chat_template= data.max_prompt_tokens= data.skip_broken= data.shuffle= rollout.batch_size= rollout.n_samples_per_prompt= rollout.max_response_tokens= rollout.temperature= rollout.top_p= rollout.top_k= rollout.min_p= rollout.stop= rollout.stop_token_ids= rollout.over_sampling_batch_size= rollout.dynamic_filter= rollout.max_filtered_rounds= rollout.custom_generate= rollout.concurrency= rollout.request_timeout_s= rollout.max_retries= rollout.max_failed_fraction= reward.type= reward.path= reward.key= reward.group= reward.timeout_s= algo.name= algo.std_normalization= algo.eps_clip= algo.eps_clip_high= algo.aggregation= algo.constant_length= algo.kl_coef= algo.kl_type= algo.entropy_coef= trainer.backend= trainer.processes= trainer.threads= trainer.global_batch_size= trainer.steps_per_rollout= trainer.max_tokens_per_micro_batch= trainer.lr= trainer.warmup_steps= trainer.lr_schedule= trainer.min_lr_ratio= trainer.beta1= trainer.beta2= trainer.adam_eps= trainer.weight_decay= trainer.clip_grad= trainer.activation_checkpointing= trainer.logits_chunk_tokens= trainer.shared_prefix= sft.steps= sft.batch_size= sft.lr= sft.warmup_steps= sft.lr_schedule= sft.min_lr_ratio= sft.data= eval.interval= eval.sets= eval.n_samples_per_prompt= eval.temperature= eval.greedy= eval.max_response_tokens= eval.max_prompts= engine.backend= engine.urls= engine.replicas= engine.threads= engine.slots= engine.max_context= engine.dtype= engine.host= engine.start_timeout_s= sync.kind= sync.timeout_s= checkpoint.interval= checkpoint.keep= cluster.backend= cluster.address= cluster.start_timeout_s= gates.action= gates.max_logprob_gap= gates.first_step_kl= gates.max_zero_variance= observe.tensorboard= observe.wandb_project= export.dtype= export.max_shard_bytes= megatron= sglang='
complete -c slime -n '__fish_seen_subcommand_from recipes' -l json
complete -c slime -n '__fish_seen_subcommand_from recipes' -l help
complete -c slime -n '__fish_seen_subcommand_from models' -l filter
complete -c slime -n '__fish_seen_subcommand_from models' -l json
complete -c slime -n '__fish_seen_subcommand_from models' -l help
complete -c slime -n '__fish_seen_subcommand_from reward' -l type
complete -c slime -n '__fish_seen_subcommand_from reward' -l recipe -r -F -a 'grpo quickstart reverse sft'
complete -c slime -n '__fish_seen_subcommand_from reward' -l set -x -a 'title= source= seed= steps= model.name= model.path= model.revision= model.source= model.init_std= model.tokenizer_vocab= model.dtype= model.trust_remote_code= data.train= data.source= data.source_args= data.count= data.holdout= data.demonstrations= data.demonstration_args= data.input_key= data.label_key= data.messages_key= data.metadata_key= data.tool_key= data.system_prompt= data.apply_chat_template= data.max_prompt_tokens= data.skip_broken= data.shuffle= rollout.batch_size= rollout.n_samples_per_prompt= rollout.max_response_tokens= rollout.temperature= rollout.top_p= rollout.top_k= rollout.min_p= rollout.stop= rollout.stop_token_ids= rollout.over_sampling_batch_size= rollout.dynamic_filter= rollout.max_filtered_rounds= rollout.custom_generate= rollout.concurrency= rollout.request_timeout_s= rollout.max_retries= rollout.max_failed_fraction= reward.type= reward.path= reward.key= reward.group= reward.timeout_s= algo.name= algo.std_normalization= algo.eps_clip= algo.eps_clip_high= algo.aggregation= algo.constant_length= algo.kl_coef= algo.kl_type= algo.entropy_coef= trainer.backend= trainer.processes= trainer.threads= trainer.global_batch_size= trainer.steps_per_rollout= trainer.max_tokens_per_micro_batch= trainer.lr= trainer.warmup_steps= trainer.lr_schedule= trainer.min_lr_ratio= trainer.beta1= trainer.beta2= trainer.adam_eps= trainer.weight_decay= trainer.clip_grad= trainer.activation_checkpointing= trainer.logits_chunk_tokens= trainer.shared_prefix= sft.steps= sft.batch_size= sft.lr= sft.warmup_steps= sft.lr_schedule= sft.min_lr_ratio= sft.data= eval.interval= eval.sets= eval.n_samples_per_prompt= eval.temperature= eval.greedy= eval.max_response_tokens= eval.max_prompts= engine.backend= engine.urls= engine.replicas= engine.threads= engine.slots= engine.max_context= engine.dtype= engine.host= engine.start_timeout_s= sync.kind= sync.timeout_s= checkpoint.interval= checkpoint.keep= cluster.backend= cluster.address= cluster.start_timeout_s= gates.action= gates.max_logprob_gap= gates.first_step_kl= gates.max_zero_variance= observe.tensorboard= observe.wandb_project= export.dtype= export.max_shard_bytes= megatron= sglang='
complete -c slime -n '__fish_seen_subcommand_from reward' -l limit
complete -c slime -n '__fish_seen_subcommand_from reward' -l list
complete -c slime -n '__fish_seen_subcommand_from reward' -l json
complete -c slime -n '__fish_seen_subcommand_from reward' -l help
complete -c slime -n '__fish_seen_subcommand_from doctor' -l json
complete -c slime -n '__fish_seen_subcommand_from doctor' -l help
complete -c slime -n '__fish_seen_subcommand_from completions' -a bash
complete -c slime -n '__fish_seen_subcommand_from completions' -a zsh
complete -c slime -n '__fish_seen_subcommand_from completions' -a fish
complete -c slime -n '__fish_seen_subcommand_from completions' -l write
complete -c slime -n '__fish_seen_subcommand_from completions' -l json
complete -c slime -n '__fish_seen_subcommand_from completions' -l help
complete -c slime -n '__fish_seen_subcommand_from runs watch report' -a '(__slime_runs)'
complete -c slime -n '__fish_seen_subcommand_from recipes' -a 'grpo quickstart reverse sft'
