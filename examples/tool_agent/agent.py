"""Solve reasoning-gym problems over several turns with a calculator, using strands-agents."""

import ast
import operator

import reasoning_gym
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.models.openai import OpenAIModel
from strands.types.exceptions import ContextWindowOverflowException, MaxTokensReachedException

from agent_wrapper import AgentFailure, RolloutApp, RolloutContext

app = RolloutApp()

SYSTEM = (
    "You solve arithmetic problems. Work each one out with the calculator tool. "
    "End your last message with 'Answer: ' and the number alone."
)
MAX_TURNS = 8
MAX_EXPRESSION = 200

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def evaluate(expression: str) -> int | float:
    """Compute an expression of numbers, + - * / // % and parentheses, without running any other code.

    Raises:
        ValueError: the expression contains something else, or cannot be computed.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"the expression is longer than {MAX_EXPRESSION} characters")

    def value(node: ast.expr) -> int | float:
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return number
            case ast.BinOp(left, op, right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(operand))
        raise ValueError(f"only numbers, + - * / // % and parentheses are allowed, not {ast.unparse(node)!r}")

    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(str(error)) from error


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: For example "(12 - 5) * 3". Numbers, + - * / // % and parentheses.
    """
    return str(evaluate(expression))  # strands returns a ValueError to the model as the tool's error


def score(reply: str, task: dict) -> float:
    """Return reasoning-gym's score, 0 to 1, of the text after the last 'Answer:', or of the whole reply."""
    answer = reply.rpartition("Answer:")[2].strip().rstrip(".")
    dataset = reasoning_gym.create_dataset(task["dataset"])
    return float(dataset.score_answer(answer=answer, entry=task))


@app.entrypoint
async def agent(context: RolloutContext) -> dict[str, object]:
    solver = Agent(
        model=OpenAIModel(client_args=context.openai_kwargs(), model_id=context.model),
        tools=[calculator],
        system_prompt=SYSTEM,
        callback_handler=None,  # the default prints each token
        # Keep the whole history: a trimmed history would start a new training sequence.
        conversation_manager=NullConversationManager(),
        retry_strategy=None,  # the client retries already
    )
    try:
        result = await solver.invoke_async(context.payload["question"], limits={"turns": MAX_TURNS})
    except (ContextWindowOverflowException, MaxTokensReachedException) as error:
        # The model used up its tokens. This is a bad solution, not a broken one, so it has a reward.
        raise AgentFailure(f"out of tokens: {type(error).__name__}", reward=0.0) from error
    reply = str(result).strip()
    return {"reward": score(reply, context.payload), "reply": reply, "stop_reason": result.stop_reason}


if __name__ == "__main__":
    app.run()
