from stable_baselines3 import PPO
model = PPO("MlpPolicy", "CartPole-v1", verbose=1, seed=0)
model.learn(total_timesteps=10_000)
model.save("ppo_cartpole")
