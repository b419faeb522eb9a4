"""Cross TextArena's frozen lake over many turns, and compact the conversation every few moves.

The agent shows the cells around the player instead of TextArena's text, which is too long for a byte-level model. The
payload has the `game`'s id, the `seed` of its start, `max_moves` (invalid ones do not count), `compact_after`, the
moves after which a summary replaces the conversation, and `max_tokens` of a reply. The reward is TextArena's, from
0 to 1.
"""

from typing import Any

import textarena
from openai import AsyncOpenAI

from agent_wrapper import RolloutApp, RolloutContext

app = RolloutApp()

RULES = "Around you: # edge, H hole, G goal. Reply [w] [a] [s] or [d]"
STEPS = {"w": (-1, 0), "a": (0, -1), "s": (1, 0), "d": (0, 1)}


class Game:
    def __init__(self, name: str, seed: int, max_moves: int) -> None:
        self._env = textarena.make(f"{name}-raw")
        self._env.reset(num_players=1, seed=seed)
        self._env.state.max_turns = max_moves

    def observe(self) -> str:
        """Return the cells around the player."""
        y, x = self._env.state.game_state["player_pos"]
        return " ".join(f"{move}{self._cell(y + down, x + right)}" for move, (down, right) in STEPS.items())

    def _cell(self, y: int, x: int) -> str:
        grid = self._env.state.game_state["grid"]
        on_it = 0 <= y < len(grid) and 0 <= x < len(grid)
        return grid[y][x].replace(" ", ".") if on_it else "#"

    def play(self, move: str) -> bool:
        """Return whether the game is over."""
        over, _ = self._env.step(move)
        return bool(over)

    def result(self) -> dict[str, Any]:
        rewards, _ = self._env.close()
        reward = max(0.0, float(rewards[0]))  # an invalid move may score below 0
        return {"reward": reward, "won": reward >= 1}


@app.entrypoint
async def agent(context: RolloutContext) -> dict[str, object]:
    task = context.payload
    game = Game(task["game"], task["seed"], task["max_moves"])
    rules = {"role": "system", "content": RULES}
    messages = [rules, {"role": "user", "content": game.observe()}]
    moves: list[str] = []
    async with AsyncOpenAI(**context.openai_kwargs()) as client:
        while True:
            completion = await client.chat.completions.create(
                model=context.model, messages=messages, max_tokens=task["max_tokens"]
            )
            moves.append(completion.choices[0].message.content or "")
            if game.play(moves[-1]):
                return game.result()
            if len(moves) % task["compact_after"] == 0:
                summary = "".join(move.strip("[]") for move in moves)
                messages = [rules, {"role": "user", "content": f"moves: {summary}\n{game.observe()}"}]
            else:
                messages += [
                    {"role": "assistant", "content": moves[-1]},
                    {"role": "user", "content": game.observe()},
                ]


if __name__ == "__main__":
    app.run()
