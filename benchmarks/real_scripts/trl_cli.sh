trl sft --model_name_or_path data/llama --dataset_name data/text --dataset_train_split train --learning_rate 2e-4 --max_length 64 --bf16 False --output_dir sft-cli
