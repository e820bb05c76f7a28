"""What other tools call our keys of `train.yaml`; an error's fix says the name here."""

from collections.abc import Mapping

_NAMES = {
    "optimizer.lr": "learning_rate base_lr max_lr init_lr learning_rate_init",
    "optimizer.name": "optim optimizer_name optimizer_type opt",
    "optimizer.weight_decay": "wd l2",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "adam_epsilon epsilon",
    "lr_schedule.name": "scheduler lr_scheduler lr_scheduler_type schedule lr_policy",
    "lr_schedule.warmup": "warmup_steps warmup_ratio warmup_epochs num_warmup_steps lr_warmup_steps",
    "global_batch_size batch_size_per_worker": "batch_size train_batch_size train_batch bs",
    "batch_schedule": "batch_size_schedule batch_size_warmup batch_size_rampup rampup_batch_size batch_ramp",
    "batch_size_per_worker": "per_device_train_batch_size per_gpu_train_batch_size local_batch_size",
    "evaluate.microbatch_size": "eval_batch_size per_device_eval_batch_size val_batch_size test_batch_size",
    "microbatch_size": "accumulate_grad_batches gradient_accumulation_steps gradient_accumulation grad_accum "
    "accumulation_steps micro_batch_size train_micro_batch_size_per_gpu device_train_microbatch_size",
    "epochs": "max_epochs num_epochs num_train_epochs n_epochs nb_epochs total_epochs max_duration",
    "max_steps": "num_steps total_steps max_iters num_iterations train_steps training_steps max_train_steps",
    "max_time_s": "max_time time_limit walltime",
    "clip_grad_norm": "gradient_clip_val max_grad_norm grad_clip gradient_clipping clip_norm max_norm",
    "precision": "amp fp16 bf16 tf32 dtype torch_dtype mixed_precision use_amp half amp_level",
    "compile": "torch_compile jit compile_mode torchdynamo",
    "strategy": "ddp_backend distributed_backend parallelism deepspeed zero_stage zero_optimization backend",
    "scaling.num_workers": "world_size nproc_per_node num_gpus gpus n_gpus devices num_devices num_processes num_nodes "
    "nnodes workers",
    "data.num_workers scaling.num_workers": "num_workers",
    "data.num_workers": "dataloader_num_workers num_data_workers loader_workers",
    "data.prefetch_factor": "dataloader_prefetch_factor prefetch",
    "data.pin_memory": "dataloader_pin_memory",
    "device": "accelerator use_cuda no_cuda use_cpu",
    "checkpoint.every_steps": "save_steps save_interval checkpoint_every every_n_train_steps save_freq",
    "checkpoint.keep": "save_total_limit save_top_k num_to_keep",
    "checkpoint.best": "load_best_model_at_end metric_for_best_model monitor",
    "checkpoint.best_mode": "greater_is_better monitor_mode mode",
    "evaluate.every_steps evaluate.every_epochs": "eval_steps eval_interval val_check_interval eval_every "
    "check_val_every_n_epoch eval_strategy evaluation_strategy",
    "log_every_steps": "logging_steps log_interval log_every_n_steps log_every print_freq",
    "seed": "random_seed random_state manual_seed",
    "drop_last": "dataloader_drop_last",
    "storage_path": "output_dir save_dir default_root_dir log_dir work_dir checkpoint_dir out_dir root_dir",
    "name": "run_name experiment_name exp_name experiment",
    "task_args": "model_args model_kwargs model_config hparams hyperparameters",
    "task": "model module model_name dataset datamodule train_func trainer trainer_class",
    "profile_steps": "profiler profile",
    "early_stopping.patience": "patience early_stop early_stopping_patience early_stopping_rounds",
    "ema.decay": "ema_decay model_ema model_ema_decay use_ema moving_average swa",
    "ddp.sync_batchnorm": "sync_bn sync_batchnorm syncbn use_sync_bn",
    "failure.error": "max_failures max_retries max_restarts retries",
    "tracking": "report_to log_with trackers tracker loggers use_wandb wandb mlflow tensorboard",
}


def by_name(names: Mapping[str, str]) -> dict[str, tuple[str, ...] | str]:
    """Turn {our keys: other names, with a space between them} round."""
    return {
        name: tuple(keys.split())
        for keys, others in names.items()
        for name in others.split()
    }


FOREIGN = by_name(_NAMES)
"""By the other tool's name: our dotted keys, or a sentence where there is none."""
for _names, _sentence in (
    (
        "sampler batch_sampler train_sampler shuffle",
        "there is none: every sample is used once an epoch, in an order that follows from `seed` alone",
    ),
    (
        "callbacks callback hooks",
        "there are none: what is the task's own belongs into methods of the Task",
    ),
    (
        "resume resume_from resume_from_checkpoint ckpt_path",
        "a run goes on by itself; start it anew with --fresh",
    ),
):
    FOREIGN |= dict.fromkeys(_names.split(), _sentence)
