"""Rollouts of LLM agents that live in their own containers, collected for a trainer."""
