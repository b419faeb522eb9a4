// An agent that follows docs/contract.md by hand, without dependencies. It needs Node 20.3 and storage.presigned.
import http from 'node:http'
import { setTimeout as sleep } from 'node:timers/promises'

const sessions = new Map() // the end of each rollout, by session id
const stop = new AbortController() // aborted by SIGTERM
const seconds = () => Date.now() / 1000
let busy = 0 // rollouts that run
let changedAt = seconds() // when the status that /ping reports has changed

// The agent: one model call. The gateway counts calls that it could not answer, and then no reward is trained.
async function agent(task, endpoint, signal) {
  const body = { model: endpoint.name, messages: [{ role: 'user', content: task.question }] }
  const reply = await post(`${endpoint.base_url}/chat/completions`, endpoint, body, signal)
  const text = reply.choices[0].message.content
  return { reward: text.match(/-?\d+/g)?.at(-1) === task.answer ? 1 : 0, extras: { reply: text } }
}

// By the Idempotency-Key, a retry gets the answer of the first request instead of a second sample.
async function post(url, { api_key }, body, signal) {
  const json = 'application/json'
  const headers = { Authorization: `Bearer ${api_key}`, 'Content-Type': json, Accept: json }
  headers['Idempotency-Key'] = crypto.randomUUID()
  return send(url, { method: 'POST', headers, body: JSON.stringify(body), signal }).then((reply) => reply.json())
}

// Retry until the signal. 412: the result exists, written by another attempt or by a request whose answer was lost.
async function send(url, options) {
  for (let pause = 500; ; pause = Math.min(2 * pause, 8000)) {
    const reply = await fetch(url, options).catch((error) => error)
    options.signal.throwIfAborted()
    if (reply.ok || reply.status === 412) return reply
    const final = reply.status < 500 && ![408, 409, 429].includes(reply.status)
    if (final || reply.headers?.get('x-should-retry') === 'false') throw new Error(await reply.text())
    await sleep(pause, undefined, { signal: options.signal })
  }
}

async function run({ endpoint, remaining_s, publish_grace_s, heartbeat_s, result: { urls }, ...request }, task) {
  const { run_id, step, task_id, rollout_id, attempt, session_id } = request
  const ids = { schema_version: 1, run_id, step, task_id, rollout_id, attempt, session_id, started_at: seconds() }
  const failure = (outcome, reason, error) => ({ outcome, failure: { reason, message: String(error) } })
  const deadline = AbortSignal.timeout(1000 * remaining_s)
  const beat = () => post(endpoint.heartbeat_url, endpoint, {}, AbortSignal.timeout(5000)).catch(() => {})
  const beats = heartbeat_s && setInterval(beat, 1000 * heartbeat_s)
  let trajectory = {}
  let result = await agent(task, endpoint, AbortSignal.any([deadline, stop.signal])).then(
    (value) => ({ outcome: 'completed', ...value }),
    (error) => {
      if (stop.signal.aborted) return failure('infra_error', 'terminated', 'the container was stopped')
      if (deadline.aborted) return failure('timed_out', 'agent_deadline', 'no reward by the deadline')
      return failure('agent_error', 'agent_exception', error)
    })
  try { // closes the session; model, segments and seal are copied unchanged
    const grace = AbortSignal.timeout(250 * publish_grace_s)
    const { unanswered_calls: lost, ...sampled } = await post(endpoint.trajectory_url, endpoint, {}, grace)
    trajectory = sampled
    const failed = lost && result.outcome !== 'timed_out'
    if (failed) result = failure('infra_error', 'model_unavailable', `${lost} model calls were not answered`)
  } catch (error) {
    if (result.outcome === 'completed') result = failure('infra_error', 'trajectory_unavailable', error)
  }
  const body = JSON.stringify({ ...ids, ...trajectory, ...result, finished_at: seconds() })
  const url = result.outcome === 'infra_error' ? urls.failure_marker : urls.result
  const headers = { 'Content-Type': 'application/octet-stream', 'If-None-Match': '*' } // both are signed
  await send(url, { method: 'PUT', headers, body, signal: AbortSignal.timeout(500 * publish_grace_s) })
  clearInterval(beats)
}

function start(request, task) {
  if (sessions.has(request.session_id)) return // a repeated invoke starts nothing
  if (!request.result.urls) throw new Error('this agent has no credentials: set storage.presigned=true')
  if (busy++ === 0) changedAt = seconds()
  const ended = () => { if (--busy === 0) changedAt = seconds() }
  sessions.set(request.session_id, run(request, task).catch(console.error).finally(ended))
}

http.createServer(async (incoming, response) => {
  const answer = (code, body) => response.writeHead(code).end(JSON.stringify(body))
  const status = busy ? 'HealthyBusy' : 'Healthy'
  if (incoming.url === '/ping') return answer(200, { status, time_of_last_update: Math.floor(changedAt) })
  try {
    const { _rollout: request, ...task } = JSON.parse(Buffer.concat(await incoming.toArray()))
    start(request, task)
    answer(200, { status: 'accepted' })
  } catch (error) {
    answer(400, { error: error.message })
  }
}).listen(Number(process.env.PORT ?? 8080), process.env.HOST ?? '0.0.0.0')

process.on('SIGTERM', async () => { // publish what is running as failures, then exit
  stop.abort()
  await Promise.all(sessions.values())
  process.exit(0)
})
