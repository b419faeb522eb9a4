"""Play a one-player game of TextArena over many turns, and compact the conversation every few moves.

The payload's fields:

- `game`: an id of TextArena such as `FrozenLake-v0`, `seed` of its start, `max_moves` (invalid ones do not count).
- `terse`: show the cells around the player of a frozen lake instead of TextArena's text, which is too long for a
  byte-level model.
- `compact_after`: moves after which the conversation is replaced by a summary; 0: never.
- `max_tokens` of a reply.

The reward is TextArena's, from 0 to 1.
"""

from typing import Any

import textarena
from openai import AsyncOpenAI

from agent_wrapper import RolloutApp, RolloutContext

app = RolloutApp()

RULES = "Around you: # edge, H hole, G goal. Reply [w] [a] [s] or [d]"
STEPS = {"w": (-1, 0), "a": (0, -1), "s": (1, 0), "d": (0, 1)}


class Game:
    def __init__(self, name: str, seed: int, max_moves: int, terse: bool) -> None:
        self._env = textarena.make(f"{name}-raw")
        self._env.reset(num_players=1, seed=seed)
        self._env.state.max_turns = max_moves
        self._terse = terse

    def observe(self) -> str:
        """Return what is new since the last call; with `terse`, the cells around the player."""
        if self._terse:
            y, x = self._env.state.game_state["player_pos"]
            return " ".join(f"{move}{self._cell(y + down, x + right)}" for move, (down, right) in STEPS.items())
        _, seen = self._env.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(text for _, text, kind in seen if kind is not own)

    def _cell(self, y: int, x: int) -> str:
        grid = self._env.state.game_state["grid"]
        on_it = 0 <= y < len(grid) and 0 <= x < len(grid)
        return grid[y][x].replace(" ", ".") if on_it else "#"

    def play(self, move: str) -> bool:
        """Return whether the game is over."""
        over, _ = self._env.step(move)
        return bool(over)

    def result(self) -> dict[str, Any]:
        rewards, info = self._env.close()
        reward = max(0.0, float(rewards[0]))  # some games score an invalid move below 0
        return {"reward": reward, "won": reward >= 1, "invalid": bool(info[0].get("invalid_move"))}


@app.entrypoint
async def agent(context: RolloutContext) -> dict[str, object]:
    task = context.payload
    game = Game(task["game"], task["seed"], task["max_moves"], task["terse"])
    rules = [{"role": "system", "content": RULES}] if task["terse"] else []
    messages = [*rules, {"role": "user", "content": game.observe()}]
    moves: list[str] = []
    async with AsyncOpenAI(**context.openai_kwargs()) as client:
        while True:
            completion = await client.chat.completions.create(
                model=context.model, messages=messages, max_tokens=task["max_tokens"]
            )
            moves.append(completion.choices[0].message.content or "")
            if game.play(moves[-1]):
                return game.result()
            if task["compact_after"] and len(moves) % task["compact_after"] == 0:
                summary = "".join(move.strip("[]") for move in moves)
                messages = [*rules, {"role": "user", "content": f"moves: {summary}\n{game.observe()}"}]
            else:
                messages += [
                    {"role": "assistant", "content": moves[-1]},
                    {"role": "user", "content": game.observe()},
                ]


if __name__ == "__main__":
    app.run()
