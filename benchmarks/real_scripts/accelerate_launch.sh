accelerate launch --cpu --num_processes 1 --mixed_precision bf16 accelerate_loop.py
