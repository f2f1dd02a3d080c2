#compdef slime
# Completion of slime for zsh; made by `slime completions zsh`.
_slime() {
  local -a runs recipes fields commands options
  local command="" i
  runs=(${SLIME_RUNS:-runs}/*/run.json(N:h:t))
  recipes=(aime calculator dapo-math-17k deepscaler gpqa grpo gsm8k math quickstart reverse search-r1 sft tool-calls)
  fields=(title= source= seed= steps= model.name= model.path= model.revision= model.source= model.init_std= model.tokenizer_vocab= model.dtype= model.trust_remote_code= data.train= data.source= data.source_args= data.curriculum.levels= data.curriculum.auto_levels= data.curriculum.key= data.curriculum.rate= data.curriculum.floor= data.count= data.holdout= data.demonstrations= data.demonstration_args= data.input_key= data.label_key= data.messages_key= data.metadata_key= data.tool_key= data.convert= data.loss_mask_type= data.system_prompt= data.prompt_template= data.apply_chat_template= data.mix= data.workers= data.stream= data.max_prompt_tokens= data.skip_broken= data.shuffle= live.idle_s= live.wait_s= live.max_staleness= live.unscored= rollout.batch_size= rollout.n_samples_per_prompt= rollout.max_response_tokens= rollout.temperature= rollout.top_p= rollout.top_k= rollout.min_p= rollout.stop= rollout.stop_token_ids= rollout.over_sampling_batch_size= rollout.dynamic_filter= rollout.max_filtered_rounds= rollout.custom_generate= rollout.on_prefix_break= rollout.concurrency= rollout.request_timeout_s= rollout.max_retries= rollout.max_failed_fraction= rollout.max_staleness= rollout.fully_async= rollout.partial= rollout.stream= rollout.partial_staleness= rollout.mask_off_policy_tokens= rollout.stale= rollout.data_source= rollout.buffer_filter= tools.use= tools.mcp= tools.shown= tools.call_format= tools.max_turns= tools.max_turn_tokens= tools.max_output_tokens= tools.timeout_s= tools.concurrency= tools.corpus= tools.search_results= tools.python_memory_mb= tools.python_isolation= reward.type= reward.path= reward.key= reward.group= reward.timeout_s= reward.retries= reward.rm_url= reward.mix= reward.judge.url= reward.judge.model= reward.judge.prompt= reward.judge.low= reward.judge.high= reward.judge.max_tokens= reward.judge.temperature= reward.judge.api_key_env= reward.code.wall_s= reward.code.memory_mb= reward.code.processes= reward.code.isolation= reward.tournament.schedule= reward.tournament.compare= reward.tournament.both_orders= algo.name= algo.rewards_normalization= algo.std_normalization= algo.whiten_advantages= algo.gamma= algo.gae_lambda= algo.value_clip= algo.critic_lr= algo.critic_warmup= algo.critic_offload= algo.eps_clip= algo.eps_clip_high= algo.dual_clip= algo.aggregation= algo.constant_length= algo.kl_coef= algo.kl_place= algo.kl_type= algo.kl_unbiased= algo.entropy_coef= algo.old_log_probs= algo.opsm_delta= algo.correction.level= algo.correction.mode= algo.correction.low= algo.correction.high= algo.correction.normalize= algo.correction.reject_level= algo.correction.reject_low= algo.correction.reject_high= algo.correction.veto= distill.teacher= distill.url= distill.coef= distill.only= trainer.backend= trainer.bridge= trainer.processes= trainer.threads= trainer.global_batch_size= trainer.steps_per_rollout= trainer.max_tokens_per_micro_batch= trainer.lr= trainer.warmup_steps= trainer.lr_schedule= trainer.min_lr_ratio= trainer.beta1= trainer.beta2= trainer.adam_eps= trainer.weight_decay= trainer.clip_grad= trainer.activation_checkpointing= trainer.logits_chunk_tokens= trainer.shared_prefix= sft.steps= sft.batch_size= sft.lr= sft.warmup_steps= sft.lr_schedule= sft.min_lr_ratio= sft.max_tokens= sft.data= eval.interval= eval.sets= eval.seed= eval.n_samples_per_prompt= eval.temperature= eval.top_p= eval.top_k= eval.greedy= eval.max_response_tokens= eval.max_prompts= engine.backend= engine.urls= engine.urls_wait_s= engine.replicas= engine.groups= engine.models= engine.threads= engine.slots= engine.max_context= engine.dtype= engine.host= engine.python= engine.api_key_env= engine.start_timeout_s= engine.on_failure= engine.max_restarts= engine.health_interval_s= engine.health_deadline_s= engine.router= sync.kind= sync.running= sync.timeout_s= sync.interval= checkpoint.interval= checkpoint.keep= cluster.backend= cluster.address= cluster.placement= cluster.gpus_per_machine= cluster.start_timeout_s= gates.action= gates.max_logprob_gap= gates.first_step_kl= gates.max_zero_variance= observe.tensorboard= observe.wandb_project= export.dtype= export.max_shard_bytes= megatron= sglang= router=)
  commands=(
    'run:Do every stage in order - data, model, SFT, the RL loop on Ray, export'
    'plan:Say what is wrong with a recipe, all at once, and what it will take'
    'init:Write a commented recipe into the current folder'
    'download:Fetch a model or data set into the shared cache (or --out), and check that it is what it says'
    'convert:Convert a model between Hugging Face and Megatron; the result carries a certificate. Run again, it continues'
    'prepare-data:Prepare prompts and demonstrations - validate, de-duplicate, hold out, count'
    'serve:Serve a model or a run (its name will do for --model); follow a run, and record conversations for it'
    'rollout:Generate and score answers - the next step of a run, or any prompt file with any model'
    'train:Train on the samples of the next step, or on demonstrations; in several processes under torchrun'
    'eval:Score held-out problems, sampled and greedy, or compare two such scores. --model may be a servers URL'
    'export:Write weights as an HF folder with tokenizer, chat template and model card; upload it if asked to'
    'watch:Follow a run live, until it ends. The exit code says how it ended'
    'report:Write a run as one HTML file - curves, stages, answers before and after, recipe'
    'runs:List runs with status, step and reward, or show one'
    'recipes:Show the recipes that come with slime, and everything a recipe can say'
    'models:List known models, or show one with its memory, FLOPs and Megatron arguments'
    'reward:Score samples with a reward function, or check it on gold answers'
    'doctor:Check Python, packages, torch, GPUs, memory, disk and ports'
    'completions:Print the completion script of a shell'
  )
  for ((i = 2; i < CURRENT; i++)); do
    if [[ $words[i] != -* ]]; then command=$words[i]; break; fi
  done
  case "$command $words[CURRENT-1]" in
    *" --run"|*" -r") compadd -a runs; _files -/; return ;;
    *" --recipe"|"init --from") compadd -a recipes; _files -g '*.toml'; return ;;
    *" --set") compadd -S '' -a fields; return ;;
  esac
  case $command in
    '') _describe command commands; compadd -- --help --version --debug; return ;;
    run) options=(--recipe --run -r --model --set --resume --overwrite --until --json --help) ;;
    plan) options=(--recipe --run -r --model --set --measure --json --help) ;;
    init) options=(--from --out -o --json --help) ;;
    download) options=(--revision --dataset --out -o --allow --ignore --offline --endpoint --json --help) ;;
    convert) options=(--to --model --hf --from --out -o --dtype --quantize --verify --dry-run --json --help) ;;
    prepare-data) options=(--run -r --recipe --input --out -o --model --set --show --list --json --help) ;;
    serve) options=(--run -r --model --step --port --api-key --follow --record --recipe --set --host --engine --replicas --router --api-key-env --help) ;;
    rollout) options=(--run -r --model --prompts --out -o --shard --as --recipe --set --json --help) ;;
    train) options=(--run -r --stage --set --json --help) ;;
    eval) options=(--run -r --model --step --data --recipe --set --compare --anyway --json --help) ;;
    export) options=(--run -r --from --step --out -o --dtype --quantize --max-shard-size --push --private --json --help) ;;
    watch) options=(--run -r --json --help) ;;
    report) options=(--run -r --out -o --bundle --json --help) ;;
    runs) options=(show --json --help) ;;
    recipes) options=(show copy --fields --algorithms --resolved --model --set --json --help) ;;
    models) options=(show --filter --json --help) ;;
    reward) options=(check score --type --recipe --set --limit --as --list --json --help) ;;
    doctor) options=(--json --help) ;;
    completions) options=(bash zsh fish --write --json --help) ;;
  esac
  case $command in
    runs|watch|report) compadd -a runs ;;
    recipes) compadd -a recipes ;;
  esac
  compadd -- $options
  _files
}
_slime "$@"
