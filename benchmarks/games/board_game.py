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


def observe(state: Any) -> str:
    """Return the cells around the player."""
    (y, x), grid = state["player_pos"], state["grid"]
    cells = []
    for move, (down, right) in STEPS.items():
        on_it = 0 <= y + down < len(grid) and 0 <= x + right < len(grid)
        cells.append(move + (grid[y + down][x + right].replace(" ", ".") if on_it else "#"))
    return " ".join(cells)


@app.entrypoint
async def agent(context: RolloutContext) -> dict[str, object]:
    task = context.payload
    game = textarena.make(f"{task['game']}-raw")
    game.reset(num_players=1, seed=task["seed"])
    game.state.max_turns = task["max_moves"]
    rules = {"role": "system", "content": RULES}
    messages = [rules, {"role": "user", "content": observe(game.state.game_state)}]
    moves: list[str] = []
    over = False
    async with AsyncOpenAI(**context.openai_kwargs()) as client:
        while not over:
            completion = await client.chat.completions.create(
                model=context.model, messages=messages, max_tokens=task["max_tokens"]
            )
            moves.append(completion.choices[0].message.content or "")
            over, _ = game.step(moves[-1])
            seen = observe(game.state.game_state)
            if len(moves) % task["compact_after"] == 0:
                summary = "".join(move.strip("[]") for move in moves)
                messages = [rules, {"role": "user", "content": f"moves: {summary}\n{seen}"}]
            else:
                messages += [{"role": "assistant", "content": moves[-1]}, {"role": "user", "content": seen}]
    rewards, _ = game.close()
    reward = max(0.0, float(rewards[0]))  # an invalid move may score below 0
    return {"reward": reward, "won": reward >= 1}


if __name__ == "__main__":
    app.run()
