import gymnasium as gym
from stable_baselines3 import DQN
env = gym.make("CartPole-v1")
model = DQN("MlpPolicy", env, verbose=1, learning_starts=100, seed=0)
model.learn(total_timesteps=10_000, log_interval=4)
model.save("dqn_cartpole")
